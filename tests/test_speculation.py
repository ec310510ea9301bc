"""Speculation changes nothing but the number of steps: same tokens with and without, always.

Heads here are untrained: they are right now and then at temperature 0 (the vocabulary is small),
and often above it, where drafts and target share their noise. Drafters that know the truth, or
never tell it, cover the ends.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax.engine
from specjax import LLM, SamplingParams
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Params
from specjax.device.noise import Stream, gumbel_noise
from specjax.device.verification import Draft
from specjax.engine import Engine
from specjax.host.speculation.policy import Rule, StaticPolicy
from specjax.prompts import derived_seed
from specjax.request import Request
from specjax.train.context import CausalRows

VOCAB = 32
MAX_LEN = 128
CHUNK = 32  # the most prompt tokens of a step
KS = (1, 4)
PROMPT_LENGTHS = (1, 5, 32, 33, 64, 70, 96, 2, 31, 40, 3, 65, 17, 90, 8, 50, 12, 77, 1, 32)
OUTPUT_LENGTHS = (20, 7, 31, 1, 24, 13, 2, 32)


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=1)


def make_llm(target, head=None, k=3, **settings):
    speculative = None
    if head:
        method, folder = head
        speculative = {"method": method, "model": str(folder), "num_speculative_tokens": k}
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": CHUNK} | settings
    return LLM(
        target.folder,
        speculative_config=speculative,
        max_model_len=MAX_LEN,
        show_progress=False,
        **settings,
    )


@pytest.fixture(scope="module")
def plain(target):
    """The target without a drafter, one request at a time."""
    with make_llm(target, max_num_seqs=1) as llm:
        yield llm


@pytest.fixture(scope="module", params=[pytest.param("eagle", marks=pytest.mark.slow), "eagle3"])
def head(request, checkpoints, target):
    return request.param, head_files(checkpoints, target, request.param).folder


def head_files(checkpoints, target, method):
    if method == "eagle":
        return checkpoints.eagle(target)
    return checkpoints.eagle3(target, draft_vocab=20, num_aux=2)


@pytest.fixture(scope="module")
def narrow(target, head):
    """Two requests at a time, to be set to any K."""
    with make_llm(target, head, k=KS[-1]) as llm:
        yield llm


@pytest.fixture(scope="module")
def wide(checkpoints, target):
    """Eight requests at a time, K = 3, prompts prefilled side by side."""
    head = "eagle3", head_files(checkpoints, target, "eagle3").folder
    with make_llm(target, head, max_num_seqs=8, max_num_batched_tokens=64) as llm:
        yield llm


@dataclass(frozen=True)
class Work:
    """Prompts with their sampling parameters, and what plain decoding makes of them."""

    prompts: list
    params: list
    expected: list

    def part(self, count):
        return Work(self.prompts[:count], self.params[:count], self.expected[:count])


def generate(llm, prompts, params):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, False)]


@pytest.fixture(scope="module")
def works(plain):
    """The same prompts, ragged in length, at temperature 0 and above it."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in PROMPT_LENGTHS]

    def work(temperature):
        params = [
            SamplingParams(
                temperature=temperature, seed=i, max_tokens=OUTPUT_LENGTHS[i % len(OUTPUT_LENGTHS)]
            )
            for i in range(len(prompts))
        ]
        return Work(prompts, params, generate(plain, prompts, params))

    return {temperature: work(temperature) for temperature in (0.0, 0.8)}


def two_best(llm, tokens, params):
    """The two ids with the best perturbed scores after `tokens`, and the gap between them."""
    model, weights = llm.target, llm.engine.params.target
    rows = CausalRows.of(1, len(tokens))
    features, _ = model.extend(weights, jnp.array(tokens), rows, None)
    scores = model.logits(weights, features.hidden[-1:])[0]
    if params.temperature:
        seed, position = jnp.array([params.seed], jnp.uint32), jnp.array([len(tokens)])
        noise = gumbel_noise(seed, Stream.TARGET, (position,), VOCAB)[0]
        scores = scores / params.temperature + noise
    values, ids = jax.lax.top_k(scores, 2)
    return set(ids.tolist()), float(values[0] - values[1])


def assert_same(llm, work, outputs):
    """Equal tokens. Above temperature 0, two scores within 2e-4 may part ways."""
    for prompt, params, expected, output in zip(
        work.prompts, work.params, work.expected, outputs, strict=True
    ):
        if output == expected:
            continue
        assert params.temperature, (len(prompt), expected, output)
        pairs = enumerate(zip(expected, output, strict=False))
        i, pair = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        best, gap = two_best(llm, prompt + expected[:i], params)
        assert set(pair) == best and gap < 2e-4, (len(prompt), i, pair, best, gap)


def sample_seeds(seed, count):
    """The seeds of a request's samples."""
    return [seed, *(derived_seed(seed, index) for index in range(1, count))]


def counts_of(metrics, before):
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_generation_tokens")
    return {name: getattr(metrics, name) - getattr(before, name) for name in names}


# --- same tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", KS)
def test_any_k_gives_the_tokens_of_plain_decoding(narrow, works, k, temperature):
    work = works[temperature]
    narrow.engine.set_policy(StaticPolicy(k))
    before = narrow.metrics()
    assert_same(narrow, work, generate(narrow, work.prompts, work.params))
    counts = counts_of(narrow.metrics(), before)
    assert 0 < counts["num_accepted_tokens"] < counts["num_draft_tokens"]
    # The last rounds of a request have room for k - 1, k - 2, ...
    missing = k * counts["num_drafts"] - counts["num_draft_tokens"]
    assert 0 <= missing <= k * (k - 1) // 2 * len(work.prompts)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_prompts", [1, 2, 3, 5, 8, 12])
def test_any_batch_gives_the_tokens_of_plain_decoding(wide, works, num_prompts, temperature):
    """Up to 8 run at once; requests end at different times, and the last four wait for a slot."""
    work = works[temperature].part(num_prompts)
    assert_same(wide, work, generate(wide, work.prompts, work.params))


@dataclass
class CyclicPolicy(Rule):
    """Another K every step."""

    choices: tuple[int, ...]
    num_steps: int = 0

    def choose(self, load):
        self.num_steps += 1
        return self.choices[self.num_steps % len(self.choices)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_k_may_change_every_step(narrow, works, temperature):
    work = works[temperature]
    narrow.engine.set_policy(CyclicPolicy((0, 4, 1)))
    before = narrow.metrics().k_histogram
    assert_same(narrow, work, generate(narrow, work.prompts, work.params))
    histogram = narrow.metrics().k_histogram
    assert all(histogram[k] - before.get(k, 0) > 10 for k in (0, 1, 4))


def test_async_scheduling_changes_neither_tokens_nor_counts(wide, works):
    work = works[0.8]
    outcomes = []
    for is_async in True, False:
        wide.engine.config = replace(wide.engine.config, async_scheduling=is_async)
        before = wide.metrics()
        outputs = generate(wide, work.prompts, work.params)
        outcomes.append((outputs, counts_of(wide.metrics(), before)))
    wide.engine.config = replace(wide.engine.config, async_scheduling=True)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1]["num_accepted_tokens"] > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_samples_give_the_tokens_of_plain_decoding(wide, plain, works, temperature):
    """Of prompts that share whole pages, a part of one, or nothing; more of them than slots."""
    work = works[temperature].part(8)
    params = [replace(s, n=3, seed=s.seed + 100) for s in work.params]
    outputs = wide.generate(work.prompts, params, use_tqdm=False)
    singles = [
        (prompt, replace(s, n=1, seed=seed), output.token_ids)
        for prompt, s, result in zip(work.prompts, params, outputs, strict=True)
        for seed, output in zip(sample_seeds(s.seed, 3), result.outputs, strict=True)
    ]
    prompts, params, outputs = zip(*singles, strict=True)
    expected = generate(plain, list(prompts), list(params))
    assert_same(wide, Work(prompts, params, expected), outputs)
    scheduler = wide.engine.scheduler
    assert scheduler.pages.num_free == scheduler.pages.num_pages


def test_requests_may_join_while_others_decode(wide, works):
    """One request is added after every second step."""
    work, engine = works[0.0], wide.engine
    waiting = [
        Request(i, tuple(prompt), params, params.max_tokens, (0,))
        for i, (prompt, params) in enumerate(zip(work.prompts, work.params, strict=True))
    ]
    waiting.reverse()
    outputs, num_steps = {}, 0
    while engine.has_work or waiting:
        if waiting and num_steps % 2 == 0:
            engine.add(waiting.pop())
        outputs |= {s.request.request_id: s.output for s in engine.step()}
        num_steps += 1
    assert [outputs[i] for i in range(len(work.prompts))] == work.expected


# --- the same bits --------------------------------------------------------------------------------


def test_exact_steps_give_the_same_bits_under_any_schedule(checkpoints, target, plain):
    """Tokens and log-probabilities, whatever K is, who runs beside whom, and who comes first."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1, 33, 70, 5, 32, 96, 17)]
    features = [
        {"logprobs": 3},
        {"temperature": 0.8, "logprobs": 20},
        {"temperature": 1.2, "top_k": 7, "top_p": 0.9, "logprobs": 1, "n": 2},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 0},
        {},
    ]
    params = [
        SamplingParams(**({"temperature": 0.0, "seed": i, "max_tokens": 20} | features[i % 5]))
        for i in range(len(prompts))
    ]

    def outcome(llm, order):
        results = llm.generate([prompts[i] for i in order], [params[i] for i in order], False)
        found = dict(zip(order, results, strict=True))
        return [
            [(output.token_ids, output.logprobs, output.cumulative_logprob) for output in outputs]
            for outputs in (found[i].outputs for i in range(len(order)))
        ]

    forwards, backwards = range(len(prompts)), range(len(prompts))[::-1]
    with make_llm(target, max_num_seqs=1, exact=True) as llm:
        expected = outcome(llm, forwards)
    head = "eagle3", head_files(checkpoints, target, "eagle3").folder
    with make_llm(target, head, max_num_seqs=5, max_num_batched_tokens=96, exact=True) as llm:
        assert outcome(llm, backwards) == expected
        metrics = llm.metrics()
        assert metrics.num_accepted_tokens > 0 and metrics.k_histogram.keys() == {3}
        llm.engine.set_policy(CyclicPolicy((1, 0, 3, 2)))
        assert outcome(llm, forwards) == expected
        metrics = llm.metrics()
        assert metrics.k_histogram.keys() == {0, 1, 2, 3}
        assert metrics.num_compiles_after_warmup == 0

    # And the tokens are those of steps in other shapes.
    common = [i for i in forwards if i % 5 in (0, 1, 4)]
    asked = [replace(params[i], logprobs=None) for i in common]
    work = Work([prompts[i] for i in common], asked, [expected[i][0][0] for i in common])
    assert_same(plain, work, generate(plain, work.prompts, work.params))


# --- drafters that know ---------------------------------------------------------------------------


@dataclass(frozen=True)
class KnowingDrafter:
    """Drafts what its parameters say: i32[R, L], the token of request r at position p.

    A request is told by its prompt's second token, which is its number.
    """

    num_requests: int
    aux_layers: tuple[int, ...] = ()

    def init_state(self, num_slots, num_pages, page_size, dtype):
        return jnp.zeros(num_slots, jnp.int32)

    def draft(self, target, params, state, context, k):
        positions = context.starts[:, None] + 1 + jnp.arange(k)
        rows = state[context.slots][:, None]
        return Draft(params.drafter.at[rows, positions].get(mode="clip"), None), state

    def observe(self, target, params, state, slots, rows, following, features, last):
        is_first = rows.positions.reshape(len(slots), -1)[:, 0] == 0
        number = jnp.where(is_first, following[:, 0], state[slots])
        return state.at[slots].set(number, mode="drop")


@dataclass(frozen=True)
class Oracle:
    """An engine whose drafter can be told the truth, lies, or both."""

    engine: Engine
    prompts: list
    truth: np.ndarray  # i32[R, L], prompt and greedy continuation

    def run(self, table, max_tokens, stop_ids=()):
        """(outputs, counts) of all prompts with drafts from `table`."""
        engine = self.engine
        engine.params = Params(engine.params.target, jnp.array(table, jnp.int32))
        before, greedy = engine.metrics(), SamplingParams(temperature=0)
        for i, prompt in enumerate(self.prompts):
            request = Request(i, tuple(prompt), greedy, max_tokens, (0,), tuple(stop_ids))
            engine.add(request)
        outputs = {}
        for _ in range(1000):  # where a bug would go on forever
            outputs |= {s.request.request_id: s.output for s in engine.step()}
        assert not engine.has_work
        counts = counts_of(engine.metrics(), before)
        return [outputs[i] for i in range(len(self.prompts))], counts

    def expected(self, i, max_tokens):
        start = len(self.prompts[i])
        return self.truth[i, start : start + max_tokens].tolist()


@pytest.fixture(scope="module")
def oracle(plain, ragged_prompts_of_module):
    prompts = ragged_prompts_of_module
    params = SamplingParams(temperature=0, max_tokens=MAX_LEN)
    outputs = generate(plain, prompts, params)
    truth = np.array(
        [prompt + output for prompt, output in zip(prompts, outputs, strict=True)], np.int32
    )
    engine = Engine(
        EngineConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=2,
            max_num_batched_tokens=CHUNK,
            num_pages=64,
            enable_prefix_caching=False,  # it learns who is who from the beginning of a prompt
        ),
        plain.target,
        KnowingDrafter(len(prompts)),
        Params(plain.engine.params.target, jnp.array(truth)),
        StaticPolicy(3),
    )
    return Oracle(engine, prompts, truth)


@pytest.fixture(scope="module")
def ragged_prompts_of_module():
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (4, 33, 64, 2, 70, 32, 9)]
    for i, prompt in enumerate(prompts):
        prompt[1] = i
    return prompts


def test_a_drafter_that_is_always_right(oracle):
    max_tokens = 1 + 4 * 8  # one from the prompt, then eight full runs
    outputs, counts = oracle.run(oracle.truth, max_tokens)
    assert outputs == [oracle.expected(i, max_tokens) for i in range(len(outputs))]
    assert counts["num_drafts"] == 8 * len(outputs)
    assert counts["num_accepted_tokens"] == 3 * counts["num_drafts"]  # AL = K + 1


def test_a_drafter_that_is_always_wrong(oracle):
    outputs, counts = oracle.run((oracle.truth + 1) % VOCAB, 33)
    assert outputs == [oracle.expected(i, 33) for i in range(len(outputs))]
    assert counts["num_drafts"] == 31 * len(outputs)  # the last of 32 rounds has room for none
    assert counts["num_accepted_tokens"] == 0  # AL = 1


def test_a_drafter_that_is_right_at_random(oracle):
    """Every accepted count comes up, from every place in a page; the counts are exact."""
    is_right = np.random.default_rng(2).random(oracle.truth.shape) < 0.7
    table = np.where(is_right, oracle.truth, (oracle.truth + 1) % VOCAB)
    outputs, counts = oracle.run(table, 50)
    num_drafts = num_accepted = 0
    for i, (prompt, output) in enumerate(zip(oracle.prompts, outputs, strict=True)):
        assert output == oracle.expected(i, 50)
        length, end = len(prompt), len(prompt) + 50
        while length < end - 1:
            run = [*is_right[i, length + 1 : length + 4].tolist(), False].index(False)
            room = end - 2 - length
            accepted = min(run, room)
            num_drafts, num_accepted = num_drafts + (room > 0), num_accepted + accepted
            length += accepted + 1
    assert (counts["num_drafts"], counts["num_accepted_tokens"]) == (num_drafts, num_accepted)


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_may_cut_an_accepted_run(oracle, max_tokens):
    outputs, counts = oracle.run(oracle.truth, max_tokens)
    assert outputs == [oracle.expected(i, max_tokens) for i in range(len(outputs))]
    assert counts["num_generation_tokens"] == max_tokens * len(outputs)
    rounds, rest = divmod(max_tokens - 1, 4)
    assert counts["num_drafts"] == (rounds + (rest > 1)) * len(outputs)


@pytest.mark.parametrize("place", range(10))
def test_a_stop_id_may_stand_anywhere_in_an_accepted_run(oracle, place):
    """It is kept, and nothing after it is put out."""
    stop = oracle.expected(0, 20)[place]
    outputs, counts = oracle.run(oracle.truth, 20, [VOCAB - 1, stop])
    for i, output in enumerate(outputs):
        expected = oracle.expected(i, 20)
        ends = [j for j, token in enumerate(expected) if token in (stop, VOCAB - 1)]
        assert output == (expected[: ends[0] + 1] if ends else expected)
    assert counts["num_generation_tokens"] == sum(map(len, outputs))


def test_slots_and_pages_come_back(oracle):
    oracle.run(oracle.truth, 20)
    scheduler = oracle.engine.scheduler
    assert scheduler.num_running == 0
    assert scheduler.pages.num_free == scheduler.pages.num_pages


# --- what a step costs besides the work -----------------------------------------------------------


def test_nothing_compiles_after_warm_up(wide, works, compilations):
    with compilations.none_expected():
        for work in works.values():
            for count in 1, 3, 7, 20:
                part = work.part(count)
                generate(wide, part.prompts, part.params)
    assert wide.metrics().num_compiles_after_warmup == 0


def test_compilations_are_seen(compilations):
    with pytest.raises(AssertionError), compilations.none_expected():
        jax.jit(lambda x: x * 3 - 1)(jnp.ones(7)).block_until_ready()


def test_one_transfer_each_way_per_step(wide, works, monkeypatch):
    """All others are forbidden to JAX, and every way to wait for an array is watched.

    Requests that take their slots bring an array of their own.
    """
    moved = {"in": 0, "out": 0, "copies_ahead": 0}
    num_admissions = 0
    is_reading = False

    def put(*arguments):
        moved["in"] += 1
        with jax.transfer_guard("allow"):
            return real_put(*arguments)

    def get(x):
        nonlocal is_reading
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

    def pack_admissions(sequences, *arguments):
        nonlocal num_admissions
        num_admissions += 1
        assert sequences, "an admission of nobody"
        return real_pack(sequences, *arguments)

    real_pack = specjax.engine.pack_admissions
    monkeypatch.setattr(specjax.engine, "pack_admissions", pack_admissions)
    real_put, real_get = jax.device_put, jax.device_get
    kind = type(jnp.zeros(1))
    real_copy = kind.copy_to_host_async
    for name in "__array__", "__bool__", "__int__", "__float__", "__index__", "__iter__":
        watch(name)
    for name in "item", "tolist", "block_until_ready":
        watch(name)
    monkeypatch.setattr(kind, "copy_to_host_async", copy_ahead)
    monkeypatch.setattr(specjax.engine.jax, "device_put", put)
    monkeypatch.setattr(specjax.engine.jax, "device_get", get)

    before, work = wide.metrics(), works[0.8]
    with jax.transfer_guard("disallow_explicit"):
        outputs = generate(wide, work.prompts, work.params)
    monkeypatch.undo()
    assert_same(wide, work, outputs)
    after = wide.metrics()
    num_steps = after.num_prefill_steps + after.num_decode_steps
    num_steps -= before.num_prefill_steps + before.num_decode_steps
    assert 0 < num_admissions <= after.num_prefill_steps - before.num_prefill_steps
    assert moved == {"in": num_steps + num_admissions, "out": num_steps, "copies_ahead": num_steps}
