"""Tensor parallel engines of every family give the tokens of one device."""

from typing import NamedTuple

import pytest
from support.engines import K, generate, make_llm, random_prompts
from support.marks import marked
from support.targets import VOCAB

from specjax import SamplingParams

pytestmark = pytest.mark.usefixtures("small_test")


class Case(NamedTuple):
    """A family, the sizes that differ from the usual ones, and the source of drafts."""

    kind: str
    sizes: dict[str, int] = {}
    num_devices: int = 2
    has_mtp: bool = False
    options: dict[str, bool] = {}


EXPERTS = {"enable_expert_parallel": True}
CASES = {
    # Key heads that do not divide: the last device has heads of zeros.
    "llama 3 on 2": Case(
        "llama", {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3}
    ),
    "llama 2 on 4": Case("llama", num_devices=4),
    "llama 2 on 3": Case("llama", num_devices=3),
    "qwen2": Case("qwen2"),
    "phi3": Case("phi3", {"pad_token_id": 0}),
    "gemma3_text": Case("gemma3_text"),
    # A family's cases are neighbours, so that its engine of one device is compiled once.
    "qwen3_moe": Case("qwen3_moe"),
    # Six experts on four devices: the last has none.
    "experts of qwen3_moe": Case("qwen3_moe", {}, 4, options=EXPERTS),
    "gpt_oss": Case("gpt_oss"),
    "experts of gpt_oss": Case("gpt_oss", options=EXPERTS),
    "glm4_moe": Case("glm4_moe", has_mtp=True),
    "glm4_moe_lite": Case("glm4_moe_lite", has_mtp=True),
    "deepseek_v3": Case("deepseek_v3", has_mtp=True),
    "experts of deepseek_v3": Case("deepseek_v3", {}, 3, True, EXPERTS),
    "deepseek_v3 without q_lora": Case("deepseek_v3", {"q_lora_rank": None}, num_devices=3),
    "qwen3_5_text": Case("qwen3_5_text", has_mtp=True),
    "qwen3_5_text on 4": Case("qwen3_5_text", num_devices=4),
    "qwen3_next": Case("qwen3_next", has_mtp=True),
    "experts of qwen3_5_moe": Case("qwen3_5_moe_text", has_mtp=True, options=EXPERTS),
}
PARAMS = [
    SamplingParams(max_tokens=12, temperature=temperature, seed=i, logprobs=2, **more)
    for i, (temperature, more) in enumerate(
        [(0.0, {}), (0.8, {}), (0.8, {"top_p": 0.9, "min_p": 0.02}), (1.0, {"top_k": 7})]
    )
]


# Heads that do not divide, experts, and latents. test_schedules.py has recurrent layers.
SLOW = "llama 3 on 2", "experts of qwen3_moe", "experts of gpt_oss", "deepseek_v3"


@pytest.mark.parametrize("name", marked(CASES, slow=SLOW))
def test_the_same_tokens(checkpoints, name):
    case = CASES[name]
    target = checkpoints.target(case.kind, **case.sizes)
    folder = (checkpoints.mtp(target) if case.has_mtp else target).folder
    prompts = random_prompts(5, 33, 18, 1, vocab_size=VOCAB)
    found = []
    for count in (1, case.num_devices):
        options = {} if count == 1 else {"tensor_parallel_size": count, **case.options}
        with make_llm(folder, "mtp" if case.has_mtp else "ngram", k=K, **options) as llm:
            outputs = generate(llm, prompts, PARAMS)
            found.append([one.outputs[0].token_ids for one in outputs])
            metrics = llm.metrics()
            found.append((metrics.num_draft_tokens, metrics.num_accepted_tokens))
    assert found[:2] == found[2:]
