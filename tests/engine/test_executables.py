"""Compiled programs on disk: which of them a later process reads, and which it must not read."""

import errno
import gc
import os
import re
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
from support.tiny import tiny_llama

from specjax.config import EngineConfig
from specjax.device import sampling
from specjax.device.drafters.drafter import NoDrafter, Params, Variant
from specjax.device.models.llama import Llama
from specjax.device.placement import Placement, default_device
from specjax.device.verification import SeedExact
from specjax.engine import executables, programs
from specjax.engine.engine import Engine
from specjax.engine.executables import (
    Executables,
    executables_folder,
    keep_programs,
    open_executables,
)
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
TARGET = tiny_llama()
MODEL = step_model(CONFIG, TARGET, NoDrafter(), SeedExact(), "cpu")
PLACEMENT = Placement.on(default_device())
KEY = Decode(2, 0, Variant())


@contextmanager
def jaxs_cache_in(folder) -> Iterator[None]:
    """Set the folder of JAX's compilation cache inside the `with` block; None for no cache."""
    others = jax.config.values["jax_compilation_cache_dir"]
    for one in folder, others:
        jax.config.update("jax_compilation_cache_dir", one)
        compilation_cache.reset_cache()
        if one is folder:
            yield


@pytest.fixture(scope="module", autouse=True)
def functions_as_users_have_them():
    """Remove the tests' checks of shapes: programs of patched functions are not kept."""
    with pytest.MonkeyPatch.context() as patch, jaxs_cache_in(None):
        for name in FUNCTIONS:
            patch.setattr(programs, name, getattr(programs, name).__wrapped__)
        yield


# --- of engines -----------------------------------------------------------------------------------


def serve(folder, **options):
    """Run two requests on an engine that keeps its programs in `folder`; return their tokens.

    The engine has no traced programs, as in a new process.
    """
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


@pytest.mark.slow
def test_a_later_process_compiles_nothing(tmp_path, compilations, caplog):
    folder, expected = tmp_path / "programs", serve(tmp_path / "programs")
    names = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(names) == 4 and {len(output) for output in expected} == {12}
    num_compiled = len(compilations.names)
    assert serve(folder) == expected
    assert compilations.names[num_compiled:] == ["jit(empty_state)"], "no step"
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert after.keys() == names.keys(), "nothing is left over"
    assert all(after[name] > names[name] for name in names), "they count as used"
    gc.collect()  # programs of earlier tests
    before = count_maps()
    for _ in range(3):
        serve(folder)
    gc.collect()
    assert count_maps() - before < 200, "what is read is let go again"
    caplog.set_level("INFO", "specjax")
    min(folder.iterdir(), key=lambda path: path.stat().st_size).unlink()
    assert serve(folder, show_progress=True) == expected
    assert re.search(r"4 programs in [\d.]+ s: 3 from the cache, 1 compiled", caplog.text)


def test_the_folder_is_for_programs_of_engines_alone(tmp_path):
    """JAX's own cache is not changed, so functions of the user are not stored in the folder."""
    try:
        keep_programs(tmp_path / "kept")
        assert executables_folder() == tmp_path / "kept" / "programs"
        jax.jit(lambda x: x * 3 + 17)(2.0)
        assert jax.config.values["jax_compilation_cache_dir"] is None
        assert not (tmp_path / "kept").exists()
        with jaxs_cache_in(str(tmp_path / "theirs")):
            assert executables_folder() == tmp_path / "theirs" / "programs"
    finally:
        keep_programs(None)
    assert executables_folder() is None


# --- of one program -------------------------------------------------------------------------------


def compile():
    """Compile a program that updates a state in place."""

    @partial(jax.jit, donate_argnums=1)
    def run(weights, state, x):
        return [one + x @ weights for one in state], (x @ weights).sum(axis=1)

    shape = jax.ShapeDtypeStruct((64, 64), np.float32)
    return run.trace(shape, [shape, shape], shape).lower().compile()


class Process:
    """A process that gets a program from a folder, or compiles it."""

    def __init__(self, folder):
        self.folder, self.num_compiled = folder / "programs", 0

    def get(self):
        """Return the program, and whether it was compiled."""
        before = self.num_compiled
        kept = Executables(self.folder, "a program of this test", [default_device()])
        return kept.get(KEY, self._compile), self.num_compiled > before

    def _compile(self):
        self.num_compiled += 1
        return compile()

    @property
    def file(self):
        (file,) = self.folder.iterdir()
        return file


@pytest.fixture
def later(tmp_path):
    """A process that starts after another one has stored the program."""
    process = Process(tmp_path)
    assert process.get()[1] and not process.get()[1]
    return process


def test_what_is_read_takes_the_same_memory_and_reuses_the_same_buffers(later):
    """As in the program that was compiled, the state is donated and updated at the same address."""

    def use(program):
        weights, x = (jnp.full((64, 64), i, jnp.float32) for i in (2, 3))
        state = [jnp.full((64, 64), i, jnp.float32) for i in (4, 5)]
        places = [one.unsafe_buffer_pointer() for one in state]
        new, result = program(weights, state, x)
        found = [np.asarray(one) for one in (*new, result)]
        assert all(one.is_deleted() for one in state)
        return found, [one.unsafe_buffer_pointer() for one in new] == places

    compiled, (again, _) = compile(), later.get()
    for one, other in zip(use(compiled)[0], use(again)[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert use(compiled)[1] and use(again)[1]
    of_both = [
        [
            getattr(one.memory_analysis(), f"{name}_size_in_bytes")
            for name in ("argument", "output", "temp", "alias")
        ]
        for one in (compiled, again)
    ]
    assert of_both[0] == of_both[1] and of_both[0][3] == 2 * 64 * 64 * 4


def test_what_comes_from_jaxs_own_cache_is_not_kept_a_second_time(later, tmp_path):
    """A program from JAX's cache lacks functions once it is stored and read again."""
    with jaxs_cache_in(str(tmp_path / "of-jax")):
        for is_kept in True, False:
            for file in later.folder.iterdir():
                file.unlink()
            assert later.get()[1] and any(later.folder.iterdir()) == is_kept


JUNK = b"junk"
DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "changed": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "another's": lambda content: executables._DIGEST(JUNK).digest() + JUNK,
    "open": lambda content: content,  # nothing but who may write to it
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_replaced(later, caplog, damage):
    file = later.file
    content = file.read_bytes()
    file.write_bytes(DAMAGES[damage](content))
    if damage == "open":
        file.chmod(0o666)
    assert later.get()[1] and "cannot be used, and is replaced" in caplog.text
    assert later.file == file and file.stat().st_size > len(content) // 2
    caplog.clear()
    assert not later.get()[1] and not caplog.records


def fail(number):
    def failing(*_, **__):
        raise OSError(number, os.strerror(number))

    return failing


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_is_only_read_is_as_good(later, caplog, monkeypatch, number):
    """In an image's or another user's folder, a file cannot be marked as recently used."""
    monkeypatch.setattr(executables.os, "utime", fail(number))
    assert not later.get()[1] and not caplog.records


def test_a_folder_that_another_user_alone_may_write_to_is_as_good(later, monkeypatch):
    monkeypatch.setattr(executables.os, "getuid", lambda: later.folder.stat().st_uid + 1)
    monkeypatch.setattr(executables, "_write", fail(errno.EPERM))
    assert not later.get()[1]


@pytest.mark.parametrize("owner", [executables.tempfile, executables.os], ids=["open", "rename"])
def test_a_folder_that_cannot_be_written_to_is_told_of_once(later, caplog, monkeypatch, owner):
    failing = "replace" if owner is os else "NamedTemporaryFile"
    monkeypatch.setattr(owner, failing, fail(errno.ENOSPC))
    later.file.unlink()
    assert later.get()[1] and later.get()[1]
    assert not list(later.folder.iterdir()), "nothing is left over"
    (told,) = caplog.records
    assert f"{later.folder}: No space left on device; compiled" in told.getMessage()


@pytest.mark.parametrize("is_parent", [False, True])
def test_a_folder_that_others_may_write_to_is_not_read(later, caplog, monkeypatch, is_parent):
    """Others could make this process run their code.

    In the parent, they could replace the folder.
    """
    monkeypatch.setattr(executables.pickle, "loads", fail(errno.EPERM))
    open_to_all = later.folder.parent if is_parent else later.folder
    mode = open_to_all.stat().st_mode
    open_to_all.chmod(0o770)
    assert later.get()[1] and later.get()[1]
    open_to_all.chmod(mode)
    (told,) = caplog.records
    assert told.getMessage().endswith(
        f"chmod go-w {open_to_all}); no compiled program is read from it or kept"
    )


def test_a_folder_that_cannot_be_looked_at_is_not_trusted(tmp_path):
    (tmp_path / "file").touch()
    assert executables._distrust(tmp_path / "file" / "programs") == "Not a directory"


def test_threads_that_compile_say_a_line_once(monkeypatch):
    told = []

    def tell(message):
        time.sleep(0.05)
        told.append(message)

    monkeypatch.setattr(executables.log, "warning", tell)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(executables._warn_once, ["a line of this test"] * 4))
    assert told == ["a line of this test"]


def test_a_new_folder_is_written_to_by_its_owner_alone(tmp_path):
    old = os.umask(0o002)  # as many systems have it
    try:
        Process(tmp_path / "new").get()
    finally:
        os.umask(old)
    for new in tmp_path / "new", tmp_path / "new" / "programs":
        assert new.stat().st_mode & 0o777 == 0o755
    assert open_executables(tmp_path / "new" / "programs", PLACEMENT, MODEL)


# --- names ----------------------------------------------------------------------------------------


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
        patch.setattr(executables, "sources_digest", lambda: "other sources")
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


def test_replicas_keep_their_programs_apart(tmp_path):
    """A program runs only on the devices that it was compiled for."""
    a, b, *_ = jax.devices()
    places = [Placement.on(a, b), Placement.on(b, a), Placement.on(a), Placement.on(b)]
    stores = [open_executables(tmp_path, place, MODEL) for place in places]
    assert len({store._path(KEY) for store in stores}) == 4


def test_programs_with_logits_processors_are_not_kept(tmp_path):
    kept = Executables(tmp_path, "", [])
    assert kept._path(Propose(2, 0, Variant(((0, (abs,)),)))) is None
    assert kept._path(ProcessRound(2, 0, ((0, (abs,)),))) is None


def test_what_was_longest_unused_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(executables, "MAX_BYTES", 100)
    for i, size in enumerate((40, 30, 20)):
        path = tmp_path / f"{i}.program"
        path.write_bytes(b"x" * size)
        os.utime(path, (1000 + i, 1000 + i))
    other = tmp_path / "another.file"
    other.write_bytes(b"x" * 500)
    for room, left in (10, "012"), (45, "12"):
        executables._make_room(tmp_path, room)
        assert {path.stem for path in tmp_path.glob("*.program")} == set(left) and other.exists()
