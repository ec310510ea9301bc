"""Drafters with heads and layers in 8 or 4 bits: drafts may change, but outputs do not."""

import json

import jax
import numpy as np
import pytest
from support.engines import SIZES, K, generate_tokens, make_llm, random_prompts, simulated_engines
from support.marks import marked
from support.refusals import label, refusal
from support.rollouts import copied, noisy
from support.shared_models import VOCAB, eagle3, hybrid, llama

from specjax import LLM, SamplingParams
from specjax.cli import main
from specjax.device.weights.scaled import Scaled
from specjax.device.weights.weight import is_weight
from specjax.rl import RolloutEngine

PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=20) for t in (0.0, 0.8, 1.0)]


def drafters(checkpoints):
    """Return (target, method, drafter) for each kind of head that drafts may come from."""
    target = llama(checkpoints)
    tied = checkpoints.target("llama", seed=1, vocab_size=VOCAB, tie_word_embeddings=True)
    return {
        "the target's": (target.folder, "eagle", checkpoints.eagle(target).folder),
        "the drafter's": (target.folder, "eagle3", eagle3(checkpoints).folder),
        "a module's": (hybrid(checkpoints), "mtp", None),
        "a draft model's embedding": (target.folder, "draft_model", tied.folder),
    }


KINDS = "the target's", "the drafter's", "a module's", "a draft model's embedding"


def relative_error(made, weights):
    return float(np.linalg.norm(made - weights) / np.linalg.norm(weights))


@pytest.mark.slow
@pytest.mark.parametrize("kind", marked(KINDS, fast=["a module's"]))
def test_outputs_are_those_without_drafts(checkpoints, kind):
    """Tokens are sampled with fixed seeds. The target's head is not quantised."""
    folder, *drafter = drafters(checkpoints)[kind]
    prompts, made = random_prompts(5, 20, 33, vocab_size=VOCAB), []
    narrow = {"head_dtype": "int8", "quantization": "fp8"}
    for named, speculation in ([None], {}), (drafter, narrow):
        with make_llm(folder, *named, speculation=speculation, dtype="float32") as llm:
            made.append(generate_tokens(llm, prompts, PARAMS))
            params = llm.engine.params
    assert made[0] == made[1]
    weights = jax.tree.leaves((params.drafter, params.head), is_leaf=is_weight)
    assert {n for x in weights if is_weight(x) for n in x.numbers} == {"fp8", "int8"}
    assert (params.head is None) == (kind == "the drafter's")
    assert not any(x.numbers for x in jax.tree.leaves(params.target, is_leaf=is_weight)
                   if is_weight(x))  # fmt: skip


@pytest.mark.slow
def test_the_copy_follows_the_target(checkpoints):
    """New weights also replace the drafter's quantised copy of the head, even while asleep."""
    target = llama(checkpoints)
    config = {"method": "eagle", "model": str(checkpoints.eagle(target).folder)}
    config |= {"num_speculative_tokens": K, "head_dtype": "int8", "quantization": "int8"}
    with (
        simulated_engines(),
        RolloutEngine(target.folder, speculative_config=config, **SIZES) as engine,
    ):
        for is_asleep in False, True:
            new = noisy(copied(engine.params.target), 1 + is_asleep)
            if is_asleep:
                engine.sleep(2)
            engine.update_weights(new)
            engine.wake_up()
            head = engine.params.head
            assert isinstance(head, Scaled)
            assert 0 < relative_error(head.plain(np.float32).values, new.lm_head.values) < 0.01
        own = engine.params.drafter
        assert own.fc.numbers == own.mlp.down.numbers == ("int8",)
        plain = {"fc.weight": np.zeros((1, 1))}
        refusal(lambda: engine.update_drafter(plain), "fc.weight", "nothing was changed")
        before = copied(own)
        with LLM(target.folder, speculative_config=config | {"quantization": None}, **SIZES) as llm:
            trained = noisy(copied(llm.engine.params.drafter), 5)
        made = engine.update_drafter(trained)
        assert 0 < made.largest_error < 0.02
        found = engine.params.drafter.fc.plain(np.float32).values
        assert 0 < relative_error(found, trained.fc.values) < 0.01
        jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype) or 1 / 0, before, own)


BAD = [
    ({"head_dtype": "int4"}, ["head_dtype='int4'", "fp8, int8"]),
    ({"quantization": "awq"}, ["quantization='awq'", "fp8, int8, int4"]),
    ({"head_dtype": "fp8", "method": "ngram"}, ["head_dtype='fp8'", "'ngram' has no weights"]),
    ({"quantization": "fp8", "method": "ngram"}, ["quantization='fp8'", "no weights"]),
]


@pytest.mark.parametrize("given, words", BAD, ids=label)
def test_what_is_refused(checkpoints, given, words):
    folder = llama(checkpoints).folder
    config = {"method": "eagle", "model": "x", "num_speculative_tokens": K} | given
    config = {n: x for n, x in config.items() if n != "model" or config["method"] != "ngram"}
    refusal(lambda: LLM(folder, speculative_config=config, **SIZES), *words)


def test_what_is_quantised_already_is_refused(checkpoints):
    target = llama(checkpoints)
    config = {"method": "eagle", "model": str(checkpoints.eagle(target).folder)}
    config |= {"num_speculative_tokens": K, "head_dtype": "fp8"}
    options = {"speculative_config": config, **SIZES}
    words = "head_dtype='fp8'", "the output head is quantised already"
    refusal(lambda: LLM(target.folder, quantization="int8", **options), *words)


def test_layers_that_int4_cannot_hold_are_counted_in_the_log(checkpoints, caplog):
    """None of the head's matrices has the 128 inputs of a group."""
    target = llama(checkpoints)
    config = {"method": "eagle", "model": str(checkpoints.eagle(target).folder)}
    config |= {"num_speculative_tokens": K, "quantization": "int4"}
    caplog.set_level("INFO", "specjax")
    options = SIZES | {"speculative_config": config, "verbose": True}
    with simulated_engines(), LLM(target.folder, **options) as llm:
        found = jax.tree.leaves(llm.engine.params.drafter, is_leaf=is_weight)
    num_plain = sum(is_weight(x) for x in found)
    assert f"{num_plain} of the drafter's {num_plain} matrices stay plain, such" in caplog.text


def test_info_counts_the_copy(checkpoints, capsys):
    """The copy of the head has one byte per weight, and a scale per token."""
    folder, found = hybrid(checkpoints), []
    config = {"method": "mtp", "num_speculative_tokens": K}
    for own in {}, {"head_dtype": "fp8"}, {"quantization": "fp8"}:
        given = ["--speculative-config", json.dumps(config | own)]
        assert main(["info", str(folder), *given, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, head, layers = (one["drafter"]["loaded_bytes"] for one in found)
    hidden = found[0]["model"]["hidden_size"]
    assert head["bfloat16"] - plain["bfloat16"] == VOCAB * (hidden + 4)
    assert layers["bfloat16"] < 0.8 * plain["bfloat16"]
    totals = [one["requests"]["weight_bytes"] for one in found]
    assert totals[1] - totals[0] == VOCAB * (hidden + 4) and totals[2] < totals[0]
    assert len({one["drafter"]["num_parameters"] for one in found}) == 1
