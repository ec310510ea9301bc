"""Exact mode: the same bits under any schedule, because all steps run the same programs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.dynamic_k import InTurn
from support.engines import EXACT, K, generate, generate_tokens, make_llm, random_prompts
from support.shared_models import VOCAB, eagle3, llama, of_few_words

from specjax import LLM, SamplingParams
from specjax.bench.identity import compare
from specjax.host.speculation.policy import GoodputPolicy, StaticPolicy

pytestmark = pytest.mark.slow

pytest.importorskip("llguidance")
LENGTHS = (1, 33, 70, 5, 32, 96, 17)
PROMPTS = random_prompts(*LENGTHS, vocab_size=VOCAB, seed=3)
FORWARDS = range(len(LENGTHS))
FEATURES = [
    {"logprobs": 3},
    {"temperature": 0.8, "logprobs": 20},
    {"temperature": 1.2, "top_k": 7, "top_p": 0.9, "logprobs": 1, "n": 2},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 0},
    {},
]
GREEDY = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
PARAMS = [SamplingParams(**{**GREEDY, "seed": i, **FEATURES[i % 5]}) for i in FORWARDS]


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints.with_letters(of_few_words(checkpoints, llama(checkpoints).folder))


@pytest.fixture(scope="module")
def head(checkpoints):
    return of_few_words(checkpoints, eagle3(checkpoints).folder)


@pytest.fixture(scope="module")
def llm(folder, head) -> Iterator[LLM]:
    with make_llm(folder, "eagle3", head, **EXACT) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm):
    """The results of requests that run one at a time, without drafts."""
    llm.engine.set_policy(StaticPolicy(0))
    alone = [outcome(llm, [i])[0] for i in FORWARDS]
    assert llm.metrics().k_histogram.keys() <= {0, K}
    llm.engine.set_policy(StaticPolicy(K))
    return alone


def outcome(llm, order, prompts=PROMPTS):
    """Return the tokens and log-probabilities of every sample, for requests in this order."""
    results = generate(llm, [prompts[i] for i in order], [PARAMS[i] for i in order])
    found = dict(zip(order, results, strict=True))
    return [
        [(output.token_ids, output.logprobs, output.cumulative_logprob) for output in outputs]
        for outputs in (found[i].outputs for i in sorted(order))
    ]


def test_one_program_does_everything(llm, compilations):
    num_programs = len({"admit", "prefill", "begin", "propose", "extend", "settle"})
    assert llm.metrics().num_compilations == num_programs
    kinds = [{}, {"top_k": 2}, {"logprobs": 20}, {"structured_outputs": {"regex": "a{1,9}"}}]
    params = [SamplingParams(temperature=0, **kind) for kind in kinds]
    prompts = [list(range(length)) for length in (1, 30, 33, 63)]
    with compilations.none_expected():
        generate(llm, prompts, params)
        for prompt, one in zip(prompts, params, strict=True):
            generate(llm, prompt, one)
    assert llm.metrics().num_compilations == num_programs


def test_the_same_bits_under_any_schedule(llm, expected):
    """Results do not depend on K, on other requests, or on the order of requests."""
    before = llm.metrics()
    assert outcome(llm, FORWARDS[::-1]) == expected
    metrics = llm.metrics()
    assert metrics.num_accepted_tokens > before.num_accepted_tokens
    assert metrics.k_histogram[0] == before.k_histogram[0], "a round without drafts"
    assert metrics.k_histogram[K] > before.k_histogram.get(K, 0)
    llm.engine.set_policy(InTurn(1, 0, K))
    assert outcome(llm, FORWARDS) == expected
    metrics = llm.metrics()
    assert metrics.k_histogram.keys() == {0, 1, K}
    assert metrics.num_compiles_after_warmup == 0


@pytest.mark.nightly
def test_the_same_bits_with_a_drafter_and_without(checkpoints):
    """The engines also have other sizes. The model has one layer, because the programs differ.

    In a deeper model, sums in different programs could round differently.
    """
    target = checkpoints.target("llama", vocab_size=32, num_hidden_layers=1)
    head = checkpoints.eagle3(target, draft_vocab=20, num_aux=2).folder
    prompts = [[token % 32 for token in prompt] for prompt in PROMPTS]
    with make_llm(target.folder, max_num_seqs=1, max_num_batched_tokens=32, **EXACT) as alone:
        expected = outcome(alone, FORWARDS, prompts)
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 96}
    with make_llm(target.folder, "eagle3", head, **sizes, **EXACT) as llm:
        assert outcome(llm, FORWARDS[::-1], prompts) == expected
        llm.engine.set_policy(InTurn(1, 0, K))
        assert outcome(llm, FORWARDS, prompts) == expected
        assert llm.metrics().num_accepted_tokens > 0


def test_it_may_be_adaptive(folder, head, expected):
    """All rounds take the same time, so the largest K is best."""
    speculation = {"adaptive": True}
    with make_llm(folder, "eagle3", head, speculation=speculation, **EXACT) as llm:
        assert isinstance(llm.engine.scheduler.policy, GoodputPolicy)
        assert outcome(llm, FORWARDS) == expected
        histogram = llm.metrics().k_histogram
    assert max(histogram) <= K and histogram[K] > 0.5 * sum(histogram.values())


def test_the_tokens_are_those_of_steps_in_other_shapes(folder, expected):
    common = [i for i in FORWARDS if i % 5 in (0, 1, 4)]
    params = [replace(PARAMS[i], logprobs=None) for i in common]
    with make_llm(folder) as plain:
        pairs = [
            (plain.request_maker.make(PROMPTS[i], one, i, f"prompt {i}"), 0)
            for i, one in zip(common, params, strict=True)
        ]
        tokens = generate_tokens(plain, [PROMPTS[i] for i in common], params)
        found = compare(plain.engine, pairs, [expected[i][0][0] for i in common], tokens)
    assert not found.mismatches and len(found.near_ties) <= 1
