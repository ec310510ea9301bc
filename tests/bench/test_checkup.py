"""`info --check` accepts a correct drafter, and names each common fault of a drafter."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import ANY_SHAPES, make_llm
from support.params import random_params

from specjax.bench.checkup import LENGTHS, Text, check
from specjax.bench.workload import read_questions
from specjax.checkpoint.demo import DRAFTERS, TARGET, demo_folder
from specjax.commands.check import CHAT, answer, check_served, read_forms, read_vocabularies
from specjax.config import SpeculativeConfig
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.draft_model import DraftModel, DraftModelParams, ModelWeights
from specjax.device.drafters.drafter import Params
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model
from specjax.llm import LLM
from specjax.text.tokenizer import load_tokenizer
from specjax.train.context import CausalRows
from specjax.train.data import CHAT_TEMPLATE
from specjax.train.target import demo_llama

pytestmark = pytest.mark.usefixtures("small_test")

K = 3


@pytest.mark.slow
def test_a_draft_model_that_is_the_target_is_always_right():
    """On a greedy text, all drafts are accepted. On a random text, only the first drafts are."""
    target = demo_llama(64, 2, 64)
    params = jax.device_put(random_params(target.specs(), 0))
    length = 24

    @jax.jit
    def extend(tokens):
        def step(i, tokens):
            features, _ = target.extend(params, tokens, CausalRows.of(1, length), None)
            best = target.logits(params, features.hidden).argmax(-1)
            return tokens.at[i].set(best[i - 1].astype(jnp.int32))

        return jax.lax.fori_loop(6, length, step, tokens)

    drawn = np.random.default_rng(0).integers(0, 64, length).astype(np.int32)
    greedy = np.asarray(extend(jnp.array(drawn)))
    drafter, both = DraftModel(ModelWeights(target)), Params(params, DraftModelParams(params))
    for tokens, is_greedy in (greedy, True), (drawn, False):
        found = check(target, both, drafter, [Text(tokens, 6)], K)
        assert not found.faults
        assert found.reference.rates == pytest.approx([1, 1, 1] if is_greedy else [1, 0, 0])
        assert found.reference.is_counted.all() == is_greedy
    with pytest.raises(ValueError, match="no answer has 4 tokens or more"):
        check(target, both, drafter, [Text(drawn, 22)], K)


class Demo(NamedTuple):
    llm: LLM
    texts: list[Text]

    def load(self, method):
        folder = demo_folder(DRAFTERS[TARGET][method])
        config = SpeculativeConfig(method=method, model=str(folder), num_speculative_tokens=K)
        return load_drafter(folder, config, self.llm.target, np.dtype("float32"))

    def faults(self, drafter, params, num_texts=2, **options):
        both, texts = Params(self.llm.engine.params.target, params), self.texts[:num_texts]
        return check(self.llm.target, both, drafter, texts, K, **options).faults


@pytest.fixture(scope="module")
def demo():
    """Texts that fit in `LENGTHS` with the drafts after them: more would take twice the time."""
    with make_llm(TARGET) as llm:
        make = read_forms(llm.get_tokenizer())[CHAT]
        prompts = sorted((make(question) for question in read_questions()), key=len)[:4]
        longest = LENGTHS - K - 1
        yield Demo(llm, [one._replace(tokens=one.tokens[:longest]) for one in answer(llm, prompts)])


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_demo_heads_pass(demo, method):
    assert demo.faults(*demo.load(method), num_texts=4, mask_ids=(0, 1)) == []


class Late(ChainDrafter):
    """A faulty drafter, whose head gets the features of the row before."""

    def observe(self, target, params, state, seen):
        count, features = len(seen.following), seen.features

        def late(x):
            return jnp.roll(x.reshape(count, -1, x.shape[-1]), 1, axis=1).reshape(x.shape)

        return super().observe(
            target, params, state, seen._replace(features=jax.tree.map(late, features))
        )


def layers_are_named(demo, drafter, params, layers):
    head = replace(drafter.head, aux_layers=layers)
    (fault,) = demo.faults(replace(drafter, head=head), params)
    return fault.startswith(f"wrong auxiliary layers: {layers} are read, (2, 6, 9) are better")


@pytest.mark.slow
def test_faults_of_a_head_are_named(demo):
    drafter, params = demo.load("eagle3")
    assert layers_are_named(demo, drafter, params, (1, 5, 8))  # one is lower
    first = replace(params, target_ids=jnp.arange(len(params.target_ids)))
    vocabularies = read_vocabularies(demo_folder(DRAFTERS[TARGET]["eagle3"]))
    (fault,) = demo.faults(drafter, first, vocabularies=vocabularies)
    assert fault.startswith("the draft vocabulary is missing or wrong: t2d is better")


@pytest.mark.nightly
def test_other_faults_of_heads_are_named(demo):
    drafter, params = demo.load("eagle3")
    assert layers_are_named(demo, drafter, params, (4, 8, 11))  # two are higher
    head = replace(drafter.head, recycle_normed=True)
    (fault,) = demo.faults(replace(drafter, head=head), params, num_texts=4)
    assert fault.startswith("the head recycles its normed state, its state before the norm is")
    assert "set norm_output to false" in fault
    drafter, params = demo.load("dflash")
    head = replace(drafter.head, mask_token_id=1)
    (fault,) = demo.faults(replace(drafter, head=head), params, mask_ids=(0, 1))
    assert fault.startswith("wrong mask token: 1 is used, 0 is better")


@pytest.mark.slow
def test_an_mtp_module_is_checked():
    """The texts are questions. Drafts count as long as a question equals the target's choices."""
    folder = demo_folder("demo-qwen3.5")
    target, params = load_model(folder, np.dtype("float32"))
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=K)
    drafter, own = load_drafter(folder, config, target, np.dtype("float32"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None and isinstance(drafter, ChainDrafter)
    questions = [np.array(tokenizer.encode(q), np.int32)[:100] for q in read_questions()[:2]]
    texts = [Text(tokens, 8) for tokens in questions]
    found = check(target, Params(params, own), drafter, texts, K)
    assert not found.faults and found.reference.length > 1.5
    (fault,) = check(target, Params(params, own), Late(drafter.head), texts, K).faults
    assert fault.startswith("features are shifted by one: features of the row after")


@pytest.mark.nightly
def test_a_mode_unlike_that_of_training_is_named(monkeypatch):
    other = "{% else %}<s>User: {{ messages[0]['content'] }}\nAssistant: {% endif %}"
    template = "{% if enable_thinking is defined and not enable_thinking %}" + CHAT_TEMPLATE + other
    rows = [(CHAT, question) for question in read_questions()[:8]]
    sizes = {"max_num_seqs": 8, "max_model_len": 256}
    with make_llm(TARGET, "eagle3", DRAFTERS[TARGET]["eagle3"], **sizes, **ANY_SHAPES) as llm:
        monkeypatch.setattr(llm, "tokenizer", replace(llm.tokenizer, template=template))
        report = check_served(llm, rows, K, {})
    (fault,) = report["faults"]
    assert fault.startswith(
        "prompts unlike the training prompts: chat template is used, chat templ"
    )
    assert "not thinking is better" in fault and len(report["served"]["rates"]) == K
