"""Speculation gives the same tokens as plain decoding, in fewer steps.

The heads are untrained. At temperature 0, they are sometimes right, because the models mostly
predict eight tokens. Above it, they are often right, because drafts and target share their noise.
Drafters that are always right or wrong are in test_known_drafts.py. A hybrid model drafts with its
own module, and resumes from recurrent states.
"""

from collections import Counter
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dynamic_k import InTurn
from support.engines import K, assert_idle, generate_tokens, make_llm, random_prompts
from support.marks import marked
from support.shared_models import (
    NUM_SNAPSHOTS,
    VOCAB,
    eagle3,
    hybrid,
    llama,
    of_few_words,
    parallel_head,
)

from specjax import SamplingParams
from specjax.bench.identity import compare
from specjax.device.models.model import is_recurrent
from specjax.host.speculation.policy import StaticPolicy
from specjax.text.seeds import derived_seed

PROMPT_LENGTHS = (1, 5, 32, 33, 64, 70, 96, 2, 31, 40, 3, 65, 17, 90, 8, 50, 12, 77, 1, 32)
OUTPUT_LENGTHS = (20, 7, 31, 1, 24, 13, 2, 32)
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Work:
    """Prompts with their sampling parameters, and the outputs of plain decoding."""

    prompts: list
    params: list
    expected: list


# The others are fast elsewhere: in tests/oracle, and MTP in the async, stress and random schedules.
# EAGLE-1 drafts by the same chain as EAGLE-3; test_draft_model.py has draft models.
PARALLEL = "p_eagle", "dflash", "medusa"
METHODS = marked(["eagle3", "mtp", *PARALLEL], fast=["eagle3"], slow=["dflash"])


@pytest.fixture(scope="module", params=METHODS)
def pair(request, checkpoints, process):
    """An engine with drafts, and an engine of the same target without drafts."""
    method, head = request.param, None
    if method == "eagle3":
        head = of_few_words(checkpoints, eagle3(checkpoints).folder)
    elif method in PARALLEL:
        head = parallel_head(checkpoints, method)
    target = hybrid(checkpoints) if method == "mtp" else llama(checkpoints).folder
    folder = of_few_words(checkpoints, target)
    snapshots = {"num_snapshots": NUM_SNAPSHOTS}
    with make_llm(folder, method, head, **snapshots) as llm, make_llm(folder, **snapshots) as plain:
        yield llm, plain
    process.keep_small()


@pytest.fixture
def llm(pair):
    """The engine with drafts, at K. Tests that need another K set it."""
    pair[0].engine.set_policy(StaticPolicy(K))
    return pair[0]


def generate_alone(llm, prompts, params):
    """Run the requests one at a time."""
    pairs = zip(prompts, params, strict=True)
    return [generate_tokens(llm, *pair)[0] for pair in pairs]


@pytest.fixture(scope="module")
def works(pair):
    """The same prompts, of various lengths, at temperature 0 and above it."""
    prompts = random_prompts(*PROMPT_LENGTHS, vocab_size=VOCAB)

    def work(temperature):
        lengths = [OUTPUT_LENGTHS[i % len(OUTPUT_LENGTHS)] for i in range(len(prompts))]
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=length, ignore_eos=True)
            for i, length in enumerate(lengths)
        ]
        return Work(prompts, params, generate_alone(pair[1], prompts, params))

    return {temperature: work(temperature) for temperature in TEMPERATURES}


def assert_same(llm, work, outputs):
    """Check that tokens are equal, except after near-ties above temperature 0."""
    make = llm.request_maker.make
    pairs = enumerate(zip(work.prompts, work.params, strict=True))
    requests = [(make(prompt, params, i, f"prompt {i}"), 0) for i, (prompt, params) in pairs]
    found = compare(llm.engine, requests, work.expected, outputs)
    assert not found.mismatches
    assert not found.near_ties or work.params[0].temperature


def counts_of(metrics, before):
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return [getattr(metrics, name) - getattr(before, name) for name in names]


# --- same tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("k", [1, K, pytest.param(5, marks=pytest.mark.nightly)])
def test_any_k_gives_the_tokens_of_plain_decoding(llm, works, k, temperature):
    if is_recurrent(llm.target) and k > K:
        pytest.skip("its ring was sized for fewer")
    work = works[temperature]
    llm.engine.set_policy(StaticPolicy(k))
    before = llm.metrics()
    assert_same(llm, work, generate_tokens(llm, work.prompts, work.params))
    num_drafts, num_draft_tokens, num_accepted = counts_of(llm.metrics(), before)
    assert 0 < num_accepted < num_draft_tokens
    # The last rounds of a request have room for k - 1, k - 2, ...
    missing = k * num_drafts - num_draft_tokens
    assert 0 <= missing <= k * (k - 1) // 2 * len(work.prompts)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_k_may_change_every_step(llm, works, temperature):
    """At most 4 requests run at once. The others wait until a request ends."""
    work = works[temperature]
    llm.engine.set_policy(InTurn(0, K, 1))
    before = llm.metrics().k_histogram
    assert_same(llm, work, generate_tokens(llm, work.prompts, work.params))
    histogram = llm.metrics().k_histogram
    assert all(histogram[k] - before.get(k, 0) > 10 for k in (0, 1, K))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_samples_give_the_tokens_of_plain_decoding(llm, pair, works, compilations, temperature):
    """Prompts share whole pages, a part of a page, or nothing. There are more samples than slots.

    Nothing is compiled.
    """
    whole = works[temperature].prompts[: 8 if temperature else 4]
    params = [replace(one, n=3, seed=one.seed + 100) for one in works[temperature].params]
    params = params[: len(whole)]
    with compilations.none_expected():
        outputs = generate_tokens(llm, whole, params)
    assert llm.metrics().num_compiles_after_warmup == 0
    prompts = [prompt for prompt in whole for _ in range(3)]
    params = [
        replace(one, n=1, seed=derived_seed(one.seed, index) if index else one.seed)
        for one in params
        for index in range(3)
    ]
    expected = generate_alone(pair[1], prompts, params)
    assert_same(llm, Work(prompts, params, expected), outputs)
    assert_idle(llm)


# --- what a step costs besides the work -----------------------------------------------------------


def test_compilations_are_seen(compilations):
    with pytest.raises(AssertionError), compilations.none_expected():
        jax.jit(lambda x: x * 3 - 1)(jnp.ones(7)).block_until_ready()


def test_a_step_moves_one_array_per_program_in_and_one_out(llm, works, monkeypatch):
    """JAX refuses all other transfers, and every way to wait for an array is watched.

    Chunks are two programs. Requests that get a slot, and snapshots of states, have a further array
    each.
    """
    moved, runs, is_reading = {"out": 0, "copies_ahead": 0}, Counter(), False

    def run(key, *arguments):
        runs[type(key).__name__] += 1
        assert sum(isinstance(x, np.ndarray) for x in arguments) == 1
        with jax.transfer_guard("allow"):
            return real_run(key, *arguments)

    def get(x, *arguments, **options):
        nonlocal is_reading
        if not isinstance(x, jax.Array):
            return real_get(x, *arguments, **options)
        moved["out"] += 1
        assert isinstance(x, jax.Array) and x.dtype == jnp.int32 and x.ndim in (2, 3)
        is_reading = True
        with jax.transfer_guard("allow"):
            value = real_get(x)
        is_reading = False
        return value

    def watch(name):
        real = getattr(kind, name)

        def watched(self, *arguments, **options):
            assert is_reading, f"jax.Array.{name} waits for the device"
            return real(self, *arguments, **options)

        monkeypatch.setattr(kind, name, watched)

    def copy_ahead(self):
        moved["copies_ahead"] += not is_reading
        return real_copy(self)

    real_run, real_get = llm.engine.programs.run, np.asarray
    kind = type(jnp.zeros(1))
    real_copy = kind.copy_to_host_async
    names = "__array__", "__bool__", "__int__", "__float__", "__index__", "__iter__"
    for name in *names, "item", "tolist", "block_until_ready":
        watch(name)
    monkeypatch.setattr(kind, "copy_to_host_async", copy_ahead)
    monkeypatch.setattr(llm.engine.programs, "run", run)
    monkeypatch.setattr(np, "asarray", get)

    before, work = llm.metrics(), works[0.8]
    with jax.transfer_guard("disallow_explicit"):
        outputs = generate_tokens(llm, work.prompts, work.params)
    monkeypatch.undo()
    assert_same(llm, work, outputs)
    after = llm.metrics()
    num_prefills = after.num_prefill_steps - before.num_prefill_steps
    num_rounds = after.num_decode_steps - before.num_decode_steps
    parts = {"Prefill": num_prefills, "Begin": num_prefills, "Decode": num_rounds}
    assert {name: runs.pop(name) for name in parts} == parts
    assert 0 < runs.pop("Admit") < num_prefills, "an admission of nobody"
    assert set(runs) <= {"Take", "Restore"} and ("Take" in runs) == is_recurrent(llm.target)
    num_steps = num_prefills + num_rounds
    assert moved == {"out": num_steps, "copies_ahead": num_steps}
