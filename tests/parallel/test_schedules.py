"""Tensor parallel engines with all other features give the outputs of one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import (
    EXACT,
    SIZES,
    VERIFICATIONS,
    K,
    generate,
    generate_tokens,
    make_llm,
    random_prompts,
)
from support.marks import marked
from support.real_schedules import Found, run_real_schedule
from support.refits import moved
from support.schedules import AnyPolicy
from support.shared_models import (
    EOS,
    NUM_SNAPSHOTS,
    eagle3,
    hybrid,
    llama,
    of_few_words,
    other_letters,
    parallel_head,
)

from specjax import SamplingParams
from specjax.device.parallel import specs_of
from specjax.engine.compiled import CompiledPrograms
from specjax.host.speculation.policy import StaticPolicy
from specjax.rl import RolloutEngine

pytestmark = pytest.mark.usefixtures("small_test")

SNAPSHOTS = {"num_snapshots": NUM_SNAPSHOTS}
EDITS = (
    {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"logit_bias": {3: 4.0, 70: 5.0, 90: -2.0}, "min_tokens": 6},
    {"bad_words": ["a", "th"], "top_k": 12, "top_p": 0.9},
    {"allowed_token_ids": [*range(1, 90, 3)], "min_p": 0.01},
    {"prompt_logprobs": 2, "logprobs": 5},
    {"structured_outputs": {"regex": "[A-Z][a-z ]{3,12}!"}},
    {"n": 2, "top_p": 0.5},
    {"logprobs": 20},
)


@pytest.mark.slow
def test_random_schedules(checkpoints, monkeypatch):
    """Requests join, leave, share prefixes and are preempted. K changes in every round.

    As on GPUs, plain requests have steps without conditionals.
    """
    is_divided = property(lambda self: self._placement.num_devices > 1)
    monkeypatch.setattr(CompiledPrograms, "waits_at_conditionals", is_divided)
    folder = checkpoints.with_letters(hybrid(checkpoints))
    config = {"method": "mtp", "num_speculative_tokens": K}
    sizes = {**SIZES, **SNAPSHOTS}
    found = Found()
    with (
        RolloutEngine(folder, speculative_config=config, tensor_parallel_size=2, **sizes) as ours,
        RolloutEngine(folder, **sizes, enable_prefix_caching=False) as plain,
    ):
        first, _ = ours._llm.engine.repertoire.variants[:2]
        assert first.is_plain
        ours._llm.engine.set_policy(AnyPolicy((0, K), np.random.default_rng(0)))
        for seed in (4, 13, 15):  # with every rare event
            found += run_real_schedule(ours._llm, plain._llm, seed)
        assert not found.identity.mismatches
        rare = "preemptions", "aborted", "prefix hits", "accepted"
        assert all(found.tally[name] > 0 for name in rare), found.tally


DRAFTERS = {
    "eagle3": (2, lambda c: ("eagle3", eagle3(c).folder)),
    "suffix": (2, lambda c: ("suffix", None)),
    "p_eagle": (2, lambda c: ("p_eagle", parallel_head(c, "p_eagle"))),
    "dflash": (4, lambda c: ("dflash", parallel_head(c, "dflash"))),
    "dspark": (2, lambda c: ("dflash", parallel_head(c, "dspark"))),
    "dflash2": (2, lambda c: ("dflash", parallel_head(c, "dflash2"))),
    "medusa": (2, lambda c: ("medusa", parallel_head(c, "medusa"))),
    "draft_model and texts": (2, lambda c: ("draft_model", hybrid(c))),
    "draft_model of other tokens": (2, lambda c: ("draft_model", other_letters(c))),
}


# EAGLE-3 is also in `test_options`.
@pytest.mark.parametrize("name", marked(DRAFTERS, slow=["suffix"]))
def test_drafters(checkpoints, name):
    """Tokens, drafts and accepted drafts are equal, with a temperature and edits of logits."""
    count, head = DRAFTERS[name]
    folder = checkpoints.with_letters(of_few_words(checkpoints, llama(checkpoints).folder))
    method, drafter = head(checkpoints)
    if method == "draft_model":
        drafter = checkpoints.with_letters(of_few_words(checkpoints, drafter))
    prompts = random_prompts(1, 33, 38, 5, vocab_size=EOS, seed=5)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True, **more)
        for i, more in enumerate([{}, {}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 2.0}}])
    ]
    found = []
    for num_devices in (1, count):
        options = {**SNAPSHOTS, "tensor_parallel_size": num_devices}
        if has_texts := name.endswith("texts"):  # which would come late or not, if asynchronous
            options |= {"speculation": {"with": ["suffix"]}, "async_scheduling": False}
        with make_llm(folder, method, drafter, **options) as llm:
            tokens = generate_tokens(llm, prompts, params)
            metrics = llm.metrics()
            found.append((tokens, metrics.num_draft_tokens, metrics.num_accepted_tokens))
            sources = metrics.accepted_tokens_per_source
            assert not has_texts or min(sources[x] for x in (method, "suffix")) > 0, sources
    assert found[0] == found[1]
    assert found[0][2] > 0


@pytest.fixture(scope="module")
def pair(checkpoints):
    """The arguments of engines with EAGLE-3, with prompts and parameters."""
    folder = checkpoints.with_letters(of_few_words(checkpoints, llama(checkpoints).folder))
    prompts = random_prompts(*range(3, 3 + len(EDITS)), vocab_size=EOS, seed=7)
    params = [
        SamplingParams(temperature=0.8 * (i % 3 > 0), seed=i, max_tokens=16, **more)
        for i, more in enumerate(EDITS)
    ]
    return (folder, "eagle3", eagle3(checkpoints).folder), prompts, params


def outcomes(llm, prompts, params):
    """Return tokens, finish reasons and rounded log-probabilities."""
    return [
        (
            [(one.token_ids, one.finish_reason, rounded(one.logprobs)) for one in found.outputs],
            rounded(found.prompt_logprobs),
        )
        for found in generate(llm, prompts, params)
    ]


def rounded(logprobs):
    return logprobs and [
        place and {token: (one.rank, round(one.logprob, 3)) for token, one in place.items()}
        for place in logprobs
    ]


WAYS = marked(["seed_exact", *VERIFICATIONS], slow=["seed_exact"])


@pytest.mark.parametrize("verification", WAYS)
def test_options(pair, verification):
    """Every option of requests, and a logits processor, with every verification method."""
    arguments, prompts, params = pair
    speculation = VERIFICATIONS.get(verification, {})
    found = []
    for count in (1, 2):
        with make_llm(*arguments, speculation=speculation, tensor_parallel_size=count) as llm:
            found.append(outcomes(llm, prompts, params))
            assert llm.metrics().num_accepted_tokens > 0
    assert found[0] == found[1]


@pytest.mark.nightly
def test_logits_processors(pair):
    """Only logits processors read the logits of the whole vocabulary."""
    arguments, prompts, params = pair
    params = [replace(one, logits_processors=[prefer_late]) for one in params[:2]]
    found = []
    for count in (1, 4):
        with make_llm(*arguments, tensor_parallel_size=count) as llm:
            found.append(outcomes(llm, prompts[:2], params))
    assert found[0] == found[1]


def prefer_late(tokens, length, logits):
    return logits + 0.05 * jnp.arange(len(logits), dtype=jnp.float32)


@pytest.mark.nightly
def test_exact_mode(pair):
    """On two devices, bits are equal with and without drafts and other requests."""
    arguments, prompts, params = pair
    prompts, params = prompts[:4], [replace(one, logprobs=2) for one in params[:4]]
    with make_llm(*arguments, **EXACT, tensor_parallel_size=2) as llm:

        def found(which):
            given = [prompts[i] for i in which], [params[i] for i in which]
            return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in generate(llm, *given)]

        llm.engine.set_policy(StaticPolicy(0))
        alone = [found([i])[0] for i in range(4)]
        llm.engine.set_policy(AnyPolicy((0, 1, K), np.random.default_rng(0)))
        assert found([3, 2, 1, 0])[::-1] == alone


@pytest.mark.slow
def test_updates(pair):
    """Updates by name, while asleep, and of the drafter; then rollouts and scores are equal."""
    (folder, method, head), prompts, _ = pair
    config = {"method": method, "model": str(head), "num_speculative_tokens": K}
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=12) for i in range(len(prompts))]
    found = []
    for count in (1, 2):
        with RolloutEngine(
            folder, speculative_config=config, tensor_parallel_size=count, **SIZES
        ) as engine:
            if count == 1:
                weights = moved(engine.params.target)
                own = moved(engine.params.drafter, 0.3)
                named = export(engine.target, weights)
                heads = export(engine.drafter.head, own)
            engine.update_weights(named)
            engine.update_drafter(heads)
            rollouts = engine.generate(prompts, params)
            engine.sleep(level=2)
            engine.update_weights(elsewhere(named))
            engine.wake_up()
            engine.update_weights(weights)  # by path, as one device has them
            again = engine.generate(prompts, params)
            for tensor, x in export(engine.target, engine.params.target).items():
                np.testing.assert_array_equal(x, named[tensor])
            assert [r.token_ids.tolist() for r in again] == [r.token_ids.tolist() for r in rollouts]
            found.append(rollouts)
    for one, other in zip(*found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def elsewhere(named):
    """Place arrays on two devices outside of the engine, divided if their size is even."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:]), "trainer")

    def place(x):
        spec = jax.sharding.PartitionSpec("trainer") if len(x) % 2 == 0 else jax.P()
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    return {name: place(x) for name, x in named.items()}


def export(model, params):
    """Return the tensors of a tree of weights, by their names in checkpoints."""
    leaves = zip(jax.tree.leaves(specs_of(model)), jax.tree.leaves(params), strict=False)
    return {name: x for spec, array in leaves for name, x in spec.split(np.asarray(array)).items()}
