"""Scripts written with vLLM's names run when only their import line changes.

Their engines have one size, plain but for the script that drafts. What a script would print is
held against the tokens that the LLM gives without vLLM's names, or against what it asked for.
"""

import asyncio

import pytest
from support.engines import SIZES

from specjax import (
    LLM,
    AsyncLLM,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from specjax.checkpoint.demo import demo_folder

MODEL = str(demo_folder("demo-llama"))
PROMPTS = ["Question: What is 2 + 3?\nAnswer:", "Question: Who is Anna?\nAnswer:"]
PREFIX = "Question: There are three red boxes. How many boxes are there?\nAnswer:"
OURS = dict(SIZES)  # sizes that all tests compile once


@pytest.fixture(scope="module")
def llm():
    with LLM(model=MODEL, **OURS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    """What the prompts give greedily, from token ids."""
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=12)
    return [one.outputs[0].token_ids for one in llm.generate(ids, params, use_tqdm=False)]


def test_basic(llm, expected):
    sampling_params = SamplingParams(temperature=0.0, max_tokens=12)
    outputs = llm.generate(PROMPTS, sampling_params)
    for prompt, output, ids in zip(PROMPTS, outputs, expected, strict=True):
        assert output.prompt == prompt and isinstance(output.request_id, str)
        assert output.finished and output.outputs[0].finished()
        assert list(output.outputs[0].token_ids) == ids
        assert output.outputs[0].text == llm.get_tokenizer().decode(ids, skip_special_tokens=True)
        times = output.metrics
        assert times.num_generation_tokens == len(ids)
        assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts
        assert 0 < times.first_token_latency <= times.last_token_ts - times.queued_ts
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 5)]
    outputs = llm.generate([TextPrompt(prompt=one) for one in PROMPTS], params, lora_request=None)
    ids = [output.outputs[0].token_ids for output in outputs]
    assert ids == [expected[0][:3], expected[1][:5]]


def test_chat(llm):
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "two?"}]
    conversation = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": parts},
    ]
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 8, 0
    (output,) = llm.chat(conversation, params, use_tqdm=False)
    assert output.prompt == (
        "<s>Question: Hello\nAnswer: Hello! How can I help?</s>Question: What is\ntwo?\nAnswer:"
    )
    ids = llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    assert output.prompt_token_ids == ids
    alone = llm.generate(TokensPrompt(prompt_token_ids=ids), params, use_tqdm=False)
    assert output.outputs == alone[0].outputs
    assert llm.get_default_sampling_params().max_tokens == 16  # a copy was changed


def test_chat_template_kwargs_and_continuation(llm):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if not enable_thinking %}(no thinking)\n{% endif %}"
        "{% if tools %}{{ tools | tojson }}\n{% endif %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    ask = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=2, temperature=0)

    def prompt_of(messages, **options):
        options |= {"chat_template": template, "use_tqdm": False}
        return llm.chat(messages, params, **options)[0].prompt

    given = {"tools": [{"name": "z<a>"}], "chat_template_kwargs": {"enable_thinking": False}}
    expected = 'user: hi\n(no thinking)\n[{"name": "z<a>"}]\nassistant:'
    assert prompt_of(ask, **given) == expected
    begun = [*ask, {"role": "assistant", "content": " The answer "}]
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(begun, **goes_on) == "user: hi\nassistant:  The answer "


def test_prefix_caching(llm):
    assert llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = [llm.generate(PREFIX + end, params, use_tqdm=False)[0] for end in (" 1", " 2")]
    first, second = (output.num_cached_tokens for output in outputs)
    page = SIZES["page_size"]
    num_shared = len(llm.get_tokenizer().encode(PREFIX))
    assert first == 0 and num_shared - page <= second <= num_shared and second % page == 0
    assert llm.reset_prefix_cache()
    (again,) = llm.generate(PREFIX + " 2", params, use_tqdm=False)
    assert again.num_cached_tokens == 0 and again.outputs == outputs[1].outputs


def test_ngram_speculation(expected):
    config = {"method": "ngram", "num_speculative_tokens": 3}
    config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    ignored = {"disable_log_stats": False, "enforce_eager": True}
    with pytest.warns(UserWarning, match="without effect here: disable_log_stats, enforce_eager$"):
        llm = LLM(model=MODEL, speculative_config=config, **ignored, **OURS)
    with llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
        metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert metrics["vllm:spec_decode_num_drafts"].value > 0
    per_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value == sum(per_position)


def test_async_streaming(expected):
    async def stream_all() -> list:
        async with AsyncLLM(MODEL, **OURS) as engine:
            streams = []
            for kind in RequestOutputKind:
                params = SamplingParams(temperature=0, max_tokens=12, output_kind=kind)
                outputs = engine.generate(PROMPTS[0], params, request_id=f"stream-{kind.name}")
                streams.append([output async for output in outputs])
                whole = await engine.generate(TextPrompt(prompt=PROMPTS[0]), params)
                assert whole.outputs[0].token_ids == expected[0]
            return streams

    for kind, seen in zip(RequestOutputKind, asyncio.run(stream_all()), strict=True):
        assert {one.request_id for one in seen} == {f"stream-{kind.name}"}
        assert [one.finished for one in seen] == [False] * (len(seen) - 1) + [True]
        parts = [one.outputs[0].token_ids for one in seen]
        is_whole = kind is not RequestOutputKind.DELTA
        assert list(parts[-1] if is_whole else sum(parts, [])) == expected[0]
        assert (len(seen) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
