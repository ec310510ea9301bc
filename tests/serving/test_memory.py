"""Sizes that do not fit are refused before allocation. Free memory is read from the kernel."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from support.engines import SIZES, make_llm
from support.refusals import refusal

from specjax import LLM, SamplingParams
from specjax.config import EngineConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.drafter import NoDrafter
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import init_caches
from specjax.device.models.registry import load_model
from specjax.host.memory import available_bytes
from specjax.host.windows import window_pages
from specjax.serving import memory
from specjax.serving.defaults import (
    DEFAULTS,
    device_defaults,
    make_config,
    stored_dtype,
)
from specjax.serving.memory import CacheBytes, EngineNeeds, Memory, read_memory, target_cache_bytes

GIB = 2**30
NOTHING: Any = None


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama")


@pytest.fixture(scope="module")
def hybrid(checkpoints):
    return checkpoints.target("qwen3_5")


@pytest.fixture
def no_weights(monkeypatch):
    for reader in "assembly.load_weights", "source.load_drafter":
        read = Mock(side_effect=AssertionError("weights were read"))
        monkeypatch.setattr(f"specjax.serving.{reader}", read)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("speculation", [None, "eagle"])
def test_a_huge_number_of_pages_is_refused(target, checkpoints, speculation):
    model = None if speculation is None else checkpoints.eagle(target).folder
    words = "num_pages=1000000000", "weights", "workspace", "lower num_pages to at most"
    text = refusal(lambda: make_llm(target.folder, speculation, model, num_pages=10**9), *words)
    assert "snapshots" not in text and "\n" not in text  # which it has none of


@pytest.mark.usefixtures("no_weights")
def test_what_takes_the_memory_is_named(hybrid, monkeypatch):
    monkeypatch.setattr(memory, "read_memory", lambda: Memory("the device", 2**19, 2**20))
    words = "num_pages=64", "pages take", "weights", "recurrent states", "snapshots", "workspace"
    sizes = {"num_pages": 64, "max_num_seqs": 64, "decode_batches": (64,)}
    refusal(lambda: make_llm(hybrid.folder, **sizes), *words, "lower max_num_seqs")
    refusal(lambda: make_llm(hybrid.folder, **sizes | {"num_snapshots": 10**7}), "snapshots")
    words = "max_model_len=128 does not fit", "weights", "gpu_memory_utilization=0.9"
    del sizes["num_pages"]
    monkeypatch.setattr("specjax.serving.source.load_drafter", lambda *_: None)
    refusal(lambda: make_llm(hybrid.folder, **sizes), *words, "lower max_model_len")


def needs_of(files):
    """Return an engine's needs, its config (4 requests of 8 pages) and its cache sizes."""
    target, _ = load_model(files.folder, np.dtype("float32"))
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    config = make_config(target, num_pages=None, page_size=8, dtype="float32", **sizes)
    cache = target_cache_bytes(target, 8, 0, "float32")
    return EngineNeeds.of(config, target, NoDrafter(), cache, 10**6, 0), config, cache


@pytest.mark.parametrize("kind", ["target", "hybrid"])
def test_needs_are_those_of_arrays_that_are_made(kind, request):
    files = request.getfixturevalue(kind)
    model, _ = load_model(files.folder, np.dtype("float32"))
    needs, _, cache = needs_of(files)
    made = jax.eval_shape(lambda: init_caches(model, CacheSizes(4, 6, 8, 1), np.dtype("float32")))
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made))
    assert 6 * cache.per_page + needs.states == total
    assert needs.snapshots == (cache.per_slot if kind == "hybrid" else 0)  # a quarter of 4


def test_pages_by_default(target, monkeypatch):
    needs, config, cache = needs_of(target)

    def pages(left, total=None, part=0.9):
        monkeypatch.setattr(memory, "read_memory", lambda: Memory("it", left, total))
        return needs.fitted(config, cache, part, 0).num_pages

    beside = sum(needs)
    assert pages(100 * GIB) == pages(80 * GIB, 80 * GIB) == 4 * 8
    assert pages(beside + 11 * cache.per_page) == 11
    assert pages(beside + 9 * cache.per_page - 1) == 8
    refusal(lambda: pages(beside + 8 * cache.per_page - 1), "max_model_len=64 does not fit")
    # On a GPU a part is kept free, in which the workspace lies, and others' arrays are counted.
    in_use, total = 10**7, 10**9
    part = (in_use + beside - needs.workspace + 13 * cache.per_page + 1) / total
    assert pages(total - in_use, total, part) == 13
    monkeypatch.setattr(memory, "read_memory", lambda: None)
    assert needs.fitted(config, cache, 0.9, 0).num_pages == 4 * 8


def test_snapshots_by_default(hybrid, monkeypatch):
    """There are four per request, halved while they take over an eighth of the free memory."""
    needs, config, cache = needs_of(hybrid)
    assert config.num_snapshots == 1 and needs.snapshots == cache.per_slot > 0

    def count(left):
        monkeypatch.setattr(memory, "read_memory", lambda: left and Memory("it", left, None))
        return needs.usual_snapshots(config, cache, 0.9, 0)

    beside = sum(needs) + cache.of_pages(config, 0)
    assert count(None) == count(100 * GIB) == 16
    rooms = {16: 16, 15: 8, 8: 8, 7: 4, 1: 1, 0: 1}
    assert {n: count(beside + 8 * n * cache.per_slot) for n in rooms} == rooms


@pytest.mark.slow
def test_as_many_prompts_as_requests_are_found_again(hybrid):
    """In a hybrid model, each prompt needs a snapshot."""
    prompts = np.random.default_rng(0).integers(0, 9, (4, 50)).tolist()
    params = SamplingParams(temperature=0, max_tokens=2)
    with make_llm(hybrid.folder, max_num_seqs=4) as llm:
        assert llm.engine.config.num_snapshots == 16
        found = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    assert [[one.num_cached_tokens for one in outputs] for outputs in found] == [[0] * 4, [48] * 4]


def test_a_check_lets_pass_what_fits_to_the_byte(target, monkeypatch):
    needs, config, cache = needs_of(target)
    least = sum(needs) + config.num_pages * cache.per_page
    monkeypatch.setattr(memory, "read_memory", lambda: Memory("it", least, None))
    needs.check(config, cache, 0)
    monkeypatch.setattr(memory, "read_memory", lambda: Memory("it", least - 1, None))
    refusal(lambda: needs.check(config, cache, 0), "num_pages=8 do not fit")
    needs.check(config, CacheBytes(cache.per_page - 1, 0), 0)


def test_the_machines_memory_and_what_cgroups_leave(tmp_path):
    def available(**files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return available_bytes(tmp_path)

    all_of_it = 700 * 1024
    info = "MemTotal: 900 kB\nMemAvailable:   700 kB\n"
    assert available(**{"proc/meminfo": info}) == all_of_it
    inner, outer, old = "sys/fs/cgroup/a/b", "sys/fs/cgroup/a", "sys/fs/cgroup/memory"
    unlimited = {f"{inner}/memory.max": "max\n", f"{inner}/memory.current": "5000\n"}
    assert available(**{"proc/self/cgroup": "0::/a/b\n"}, **unlimited) == all_of_it
    around = {f"{outer}/memory.max": "60000\n", f"{outer}/memory.current": "50000\n"}
    droppable = {f"{outer}/memory.stat": "anon 3\ninactive_file 2000\n"}
    assert available(**around, **droppable) == 12000
    groups = {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/c\n"}
    limit, usage = f"{old}/memory.limit_in_bytes", f"{old}/memory.usage_in_bytes"
    assert available(**groups, **{limit: f"{2**63 - 4096}\n", usage: "4096\n"}) == all_of_it
    assert available(**{limit: "8192\n"}) == 4096


def test_this_machine_has_memory():
    found = read_memory()
    assert found is not None and 2**20 < found.available < 2**50 and found.total is None


def test_defaults_by_device(target, monkeypatch):
    model, _ = load_model(target.folder, np.dtype("float32"))
    names = "max_model_len", "max_num_seqs", "max_num_batched_tokens"
    unsaid = dict.fromkeys(names)

    def sizes():
        config = make_config(model, num_pages=None, page_size=16, **unsaid)
        return [getattr(config, name) for name in names]

    assert device_defaults() == DEFAULTS["cpu"] and sizes() == [512, 16, 512]
    assert DEFAULTS["cpu"].model_len(10**6) == 8192 and DEFAULTS["gpu"].model_len(10**6) == 10**6
    monkeypatch.setattr("specjax.serving.defaults.device_defaults", lambda: DEFAULTS["gpu"])
    assert sizes() == [512, 256, 8192]


def test_as_many_requests_as_their_states_fit(monkeypatch):
    """States and snapshots (a quarter as many) take at most half of the free memory."""
    gpu = DEFAULTS["gpu"]
    monkeypatch.setattr(memory, "device_defaults", lambda: gpu)

    def usual(left, per_slot, weights=0):
        monkeypatch.setattr(memory, "read_memory", lambda: Memory("the device", left, left))
        monkeypatch.setattr(memory, "target_cache_bytes", lambda *_: CacheBytes(1, per_slot))
        return memory.usual_num_seqs(NOTHING, 0, "float32", weights)

    assert usual(1000, 0) == gpu.max_num_seqs == 256
    assert usual(2 * 320 * 10, 10) == 256 and usual(2 * 320 * 10 - 2, 10) == 128
    assert usual(2 * 320 * 10 + 500, 10, 500) == 256
    assert usual(1, 10) == 1 and usual(100, 10, 500) == 1
    monkeypatch.setattr(memory, "read_memory", lambda: None)
    assert memory.usual_num_seqs(NOTHING, 0, "float32", 0) == 256


def test_the_dtype_that_a_config_says():
    inner = {"dtype": "float32", "text_config": {"dtype": "bfloat16"}}
    for fields in {"torch_dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}, inner:
        assert stored_dtype(HFConfig(fields, "config.json")) == "bfloat16"
    assert stored_dtype(HFConfig({"dtype": "float"}, "config.json")) == "float32"
    for unnamed in None, "auto", "torch.float8_e4m3fn":
        assert stored_dtype(HFConfig({"dtype": unnamed}, "config.json")) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_params_of_a_model_value_are_finite(target, bad):
    model, params = load_model(target.folder, np.dtype("float32"))
    down = params.layers[1].mlp.down
    down.__dict__["values"] = down.values.at[0, 0].set(bad)
    refusal(lambda: LLM(model, params=params, **SIZES), "layers[1].mlp.down", "NaN or infinity")


def test_windows_have_what_is_in_use_and_other_layers_the_rest():
    """4 requests have 8 pages of 8 tokens. Half of a page's 100 bytes is for window layers.

    The window has 16 tokens.
    """
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8, "page_size": 8}
    config = EngineConfig(**sizes, num_pages=8, enable_prefix_caching=False)
    cache, windowed = CacheBytes(100, 0, ((16, 50),)), CacheBytes(50, 0, ((16, 50),))
    # Of each request 2 pages, one for two rounds of a token, 3 that are used in part; one chunk.
    in_use, one = 4 * 6 + 1, 7
    assert window_pages(replace(config, num_pages=99), 16, 0) == in_use

    def counts(cache, room):
        fitted = cache.fitted(config, room, 0)
        return fitted and (fitted.num_pages, window_pages(fitted, 16, 0))

    assert counts(cache, 10**6) == (32, in_use)
    assert counts(cache, 50 * (30 + in_use)) == (30, in_use)
    assert counts(cache, 50 * 40) == (20, 20), "not fewer of the others than of windows"
    assert counts(cache, 50 * (8 + one)) == (8, one)
    assert counts(cache, 50 * (8 + one) - 1) is None
    # If all layers have the window nothing else takes memory.
    assert counts(windowed, 50 * 20) == (32, 20)
    assert counts(windowed, 50 * one) == (32, one) and counts(windowed, 50 * one - 1) is None
    fitted = cache.fitted(config, 50 * 40, 0)
    assert cache.of_pages(fitted, 0) == 50 * 40
