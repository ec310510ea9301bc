"""Programs on disk: what a later process reads, and what it must not."""

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.compilations import count_maps
from support.engines import programs_with
from support.shapes import FUNCTIONS

from specjax.config import EngineConfig
from specjax.device import sampling
from specjax.device.drafters.drafter import NoDrafter, Params, Variant
from specjax.device.models.layers.rope import Rope
from specjax.device.models.llama import Llama
from specjax.device.placement import Placement, default_device
from specjax.device.verification import SeedExact
from specjax.engine import executables, programs
from specjax.engine.engine import Engine
from specjax.engine.executables import Executables, open_executables
from specjax.engine.programs import Decode, ProcessRound, Propose, Settle
from specjax.engine.step_model import step_model
from specjax.host.request import Request
from specjax.host.speculation.policy import StaticPolicy
from specjax.sampling_params import SamplingParams

pytestmark = pytest.mark.every_jax
CONFIG = EngineConfig(
    max_model_len=32,
    max_num_seqs=2,
    max_num_batched_tokens=32,
    num_pages=8,
    decode_batches=(2,),
    prefill_shapes=((2, 16),),
    compile_ahead=True,
)
TARGET = Llama(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=Rope(head_dim=8),
    max_position=32,
)
MODEL = step_model(CONFIG, TARGET, NoDrafter(), SeedExact(), "cpu")
PLACEMENT = Placement.on(default_device())
KEY = Decode(2, 0, Variant())


@contextmanager
def without_jaxs_cache() -> Iterator[None]:
    """JAX keeps nothing that it compiles."""
    others = jax.config.values["jax_compilation_cache_dir"]
    _keep_in(None)
    yield
    _keep_in(others)


@pytest.fixture(scope="module", autouse=True)
def functions_as_users_have_them():
    """Patched ones, as those that check shapes are, keep programs from being kept."""
    with pytest.MonkeyPatch.context() as patch:
        for name in FUNCTIONS:
            patch.setattr(programs, name, getattr(programs, name).__wrapped__)
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of a first process, and the tokens it came to."""
    folder = tmp_path_factory.mktemp("first")
    with without_jaxs_cache():
        return folder, serve(folder)


@pytest.fixture
def expected(first):
    return first[1]


@pytest.fixture
def folder(first, tmp_path):
    """A copy of what the first process left."""
    folder = shutil.copytree(first[0], tmp_path / "programs")
    with without_jaxs_cache():
        yield folder


@pytest.fixture
def one(folder):
    """The file that is compiled again most quickly."""
    return min(folder.iterdir(), key=lambda path: path.stat().st_size)


def _keep_in(folder):
    """Where JAX keeps what it compiles."""
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def serve(folder, **options):
    """The tokens of two requests, by an engine that has traced nothing before and keeps its
    programs in a folder: as if it were in a process of its own."""
    make_programs = programs_with(jits={}, find_folder=lambda: folder)
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda spec: rng.normal(size=spec.shape).astype(np.float32), TARGET.specs()
    )
    params = Params(jax.device_put(weights), None)
    parts = CONFIG, TARGET, NoDrafter(), params, StaticPolicy(0)
    engine = Engine(*parts, make_programs=make_programs, **options)
    samples = []
    for i in range(2):
        params = SamplingParams(temperature=float(i))
        samples += engine.add(Request(i, (1, 2, 3 + i), params, 12, (i,)))
    while engine.has_work:
        engine.step()
    engine.close()
    return [sample.output for sample in samples]


def test_a_later_process_compiles_nothing(folder, expected, compilations):
    names = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(names) == 4 and {len(output) for output in expected} == {12}
    with compilations.none_expected():
        assert serve(folder) == expected
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert after.keys() == names.keys(), "nothing is left over"
    assert all(after[name] > names[name] for name in names), "they count as used"


def test_what_is_read_takes_the_same_memory_and_reuses_the_same_buffers(folder):
    """As the program that was compiled: the state is donated, in memory and by address."""

    def compile():
        @partial(jax.jit, donate_argnums=1)
        def run(weights, state, x):
            return [one + x @ weights for one in state], (x @ weights).sum(axis=1)

        shape = jax.ShapeDtypeStruct((64, 64), np.float32)
        return run.trace(shape, [shape, shape], shape).lower().compile()

    def use(program):
        weights, x = (jnp.full((64, 64), i, jnp.float32) for i in (2, 3))
        state = [jnp.full((64, 64), i, jnp.float32) for i in (4, 5)]
        places = [one.unsafe_buffer_pointer() for one in state]
        new, result = program(weights, state, x)
        found = [np.asarray(one) for one in (*new, result)]
        assert all(one.is_deleted() for one in state)
        return found, [one.unsafe_buffer_pointer() for one in new] == places

    kept = Executables(folder, "a program of this test", [default_device()])
    compiled = kept.get(KEY, compile)
    again = kept.get(KEY, lambda: pytest.fail("it was compiled again"))
    for one, other in zip(use(compiled)[0], use(again)[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert use(compiled)[1] and use(again)[1]
    sizes = "argument", "output", "temp", "alias"
    of_both = [
        [getattr(one.memory_analysis(), f"{name}_size_in_bytes") for name in sizes]
        for one in (compiled, again)
    ]
    assert of_both[0] == of_both[1] and of_both[0][3] == 2 * 64 * 64 * 4


def test_what_is_read_is_let_go_again(folder):
    serve(folder)
    before = count_maps()
    for _ in range(3):
        serve(folder)
    assert count_maps() - before < 200


def test_what_comes_from_jaxs_own_cache_is_not_kept_a_second_time(folder, one, expected, tmp_path):
    """It would lack functions when it is read."""
    _keep_in(str(tmp_path / "of-jax"))
    one.unlink()
    assert serve(folder) == expected and one.exists()
    one.unlink()
    assert serve(folder) == expected and not one.exists()
    assert serve(folder) == expected


@pytest.mark.parametrize("damage", ["cut", "changed", "another's", "open"])
def test_a_damaged_file_is_replaced(folder, one, expected, caplog, damage):
    content = one.read_bytes()
    if damage == "cut":
        damaged = content[: len(content) // 2]
    elif damage == "changed":
        damaged = content[:-1] + bytes([content[-1] ^ 1])
    elif damage == "another's":
        damaged = executables._DIGEST(b"junk").digest() + b"junk"
    else:  # nothing but who may write to it
        damaged = content
        one.chmod(0o666)
    one.write_bytes(damaged)
    assert serve(folder) == expected
    assert "cannot be used, and is replaced" in caplog.text
    assert one.stat().st_size > len(content) // 2
    caplog.clear()
    assert serve(folder) == expected and not caplog.records


def fail(number):
    def failing(*_, **__):
        raise OSError(number, os.strerror(number))

    return failing


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_is_only_read_is_as_good(
    folder, expected, compilations, caplog, monkeypatch, number
):
    """Of an image, or of another user: a file cannot be marked as used."""
    monkeypatch.setattr(executables.os, "utime", fail(number))
    with compilations.none_expected():
        assert serve(folder) == expected
    assert not caplog.records


@pytest.mark.parametrize("owner", [executables.tempfile, executables.os], ids=["open", "rename"])
def test_a_folder_that_cannot_be_written_to_is_told_of_once(
    folder, one, expected, caplog, monkeypatch, owner
):
    failing = "replace" if owner is os else "NamedTemporaryFile"
    monkeypatch.setattr(owner, failing, fail(errno.ENOSPC))
    for path in [path for path in folder.iterdir() if path != one]:
        path.unlink()
    assert serve(folder) == expected and list(folder.iterdir()) == [one], "nothing is left over"
    (told,) = caplog.records
    assert f"{folder}: No space left on device; compiled" in told.getMessage()


@pytest.mark.parametrize("is_parent", [False, True])
def test_a_folder_that_others_may_write_to_is_not_read(
    folder, expected, caplog, monkeypatch, is_parent
):
    """Who writes there would run code in this process; in the one above, by another folder."""
    monkeypatch.setattr(executables.pickle, "loads", fail(errno.EPERM))
    open_to_all = folder.parent if is_parent else folder
    mode = open_to_all.stat().st_mode
    open_to_all.chmod(0o770)
    for _ in range(2):
        assert serve(folder) == expected
    open_to_all.chmod(mode)
    (told,) = caplog.records
    assert told.getMessage().endswith(
        f"chmod go-w {open_to_all}); no compiled program is read from it or kept"
    )


def test_threads_that_compile_say_a_line_once(monkeypatch):
    told = []

    def tell(message):
        time.sleep(0.05)
        told.append(message)

    monkeypatch.setattr(executables.log, "warning", tell)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(executables._warn_once, ["a line of this test"] * 4))
    assert told == ["a line of this test"]


def test_a_folder_that_another_user_alone_may_write_to_is_as_good(folder, expected, monkeypatch):
    monkeypatch.setattr(executables.os, "getuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.setattr(executables, "_write", fail(errno.EPERM))
    assert serve(folder) == expected


def test_a_new_folder_is_written_to_by_its_owner_alone(tmp_path):
    old = os.umask(0o002)  # as many systems have it
    try:
        with without_jaxs_cache():
            serve(tmp_path / "new" / "programs")
    finally:
        os.umask(old)
    for new in tmp_path / "new", tmp_path / "new" / "programs":
        assert new.stat().st_mode & 0o777 == 0o755
    assert open_executables(tmp_path / "new" / "programs", PLACEMENT, MODEL)


def test_the_log_tells_what_was_compiled_and_what_was_read(folder, one, caplog):
    caplog.set_level("INFO", "specjax")
    one.unlink()
    serve(folder, show_progress=True)
    assert re.search(r"4 programs in [\d.]+ s: 3 from the cache, 1 compiled", caplog.text)


def test_names_follow_from_everything(tmp_path, monkeypatch):
    def name(key=KEY, model=MODEL, *origin):
        kept = open_executables(tmp_path, PLACEMENT, model, *origin)
        return kept and kept._path(key)

    names = [
        name(),
        name(replace(KEY, batch=4)),
        name(replace(KEY, k=1)),
        name(replace(KEY, variant=Variant(num_logprobs=5))),
        name(Settle(2, 0, Variant())),
        name(KEY, MODEL._replace(row_multiple=4)),
        name(KEY, MODEL._replace(target=replace(TARGET, rms_norm_eps=1e-6))),
        name(KEY, MODEL, jax.ShapeDtypeStruct((2,), np.float32)),
        name(KEY, MODEL, jax.ShapeDtypeStruct((3,), np.float32)),
    ]
    assert name() == names[0]
    with jax.default_matmul_precision("highest"):  # also where an engine was built before
        names.append(name())
    with monkeypatch.context() as patch:
        executables._environment.cache_clear()
        patch.setattr(executables, "_sources", lambda: "other sources")
        names.append(name())
    executables._environment.cache_clear()
    assert None not in names and len(set(names)) == len(names)


def test_code_of_a_users_own_is_not_known_by_its_name(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class OwnTarget(Llama):
        pass

    own = OwnTarget(**vars(TARGET))
    assert open_executables(tmp_path, PLACEMENT, MODEL)
    assert open_executables(tmp_path, PLACEMENT, MODEL._replace(target=own)) is None
    assert open_executables(tmp_path, PLACEMENT, MODEL, object()) is None, "known by its address"
    monkeypatch.setattr(sampling, "choose", lambda *_, **__: None)
    assert open_executables(tmp_path, PLACEMENT, MODEL) is None
    monkeypatch.undo()
    monkeypatch.setattr(Llama, "forward", lambda *_, **__: None, raising=False)
    assert open_executables(tmp_path, PLACEMENT, MODEL) is None


def test_what_was_longest_unused_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(executables, "MAX_BYTES", 100)
    for i, size in enumerate((40, 30, 20)):
        path = tmp_path / f"{i}.program"
        path.write_bytes(b"x" * size)
        os.utime(path, (1000 + i, 1000 + i))
    (tmp_path / "another.file").write_bytes(b"x" * 500)
    executables._make_room(tmp_path, 10)
    assert {path.name for path in tmp_path.iterdir()} == {*map("{}.program".format, range(3))} | {
        "another.file"
    }
    executables._make_room(tmp_path, 45)
    assert {path.name for path in tmp_path.glob("*.program")} == {"1.program", "2.program"}


def test_programs_with_logits_processors_are_not_kept(tmp_path):
    kept = Executables(tmp_path, "", [])
    assert kept._path(Propose(2, 0, Variant(((0, (abs,)),)))) is None
    assert kept._path(ProcessRound(2, 0, ((0, (abs,)),))) is None
