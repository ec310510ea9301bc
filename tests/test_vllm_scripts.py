"""vLLM's calls are accepted, or refused before anything is generated; simulated."""

import asyncio
import json

import pytest
from support.engines import SIZES, simulated_engines
from support.refusals import refusal
from support.scripts import TextScript
from support.texts import LETTERS_EOS, VOCAB, letters_folder, simulated_llm
from tokenizers import Tokenizer

from specjax import (
    LLM,
    AsyncLLM,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from specjax.serving.vllm_options import ONE_VALUE, PASSED_OVER, take_vllm_options
from specjax.text.generation_config import read_default_params

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if enable_thinking is false %}(no thinking){% endif %}{% if tools %}{{ tools | tojson }}"
    "{% endif %}{% if add_generation_prompt %}me:{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(checkpoints):
    folder = checkpoints.copy(letters_folder(checkpoints))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.5, "top_k": 7, "max_new_tokens": 5, "do_sample": True})
    )
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with simulated_llm(folder, script=TextScript(VOCAB)) as llm:
        yield llm


def test_a_script(llm):
    """Prompts are texts, vLLM's TextPrompt and TokensPrompt, and token ids."""
    ids = [llm.get_tokenizer().encode(prompt) for prompt in ("ab", "What is two?")]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 5)]
    expected = [one.outputs for one in llm.generate(ids, params, use_tqdm=False)]
    typed = [TextPrompt(prompt="ab"), TokensPrompt(prompt_token_ids=ids[1])]
    for prompts in ["ab", "What is two?"], typed:
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=None)
        assert [one.outputs for one in outputs] == expected
        assert [one.prompt_token_ids for one in outputs] == ids and outputs[0].prompt == "ab"
    for output, most in zip(outputs, (3, 5), strict=True):
        (completion,), times = output.outputs, output.metrics
        assert output.finished and completion.finished() and isinstance(output.request_id, str)
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
        assert times.num_generation_tokens == len(completion.token_ids) == most
        assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts
        assert 0 < times.first_token_latency <= times.last_token_ts - times.queued_ts


def test_speculation_and_its_metrics(folder, llm):
    config = {"method": "ngram", "num_speculative_tokens": 3}
    config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    ignored = {"disable_log_stats": False, "enforce_eager": True}
    with (
        simulated_engines(TextScript(VOCAB)),
        pytest.warns(UserWarning, match="without effect here: disable_log_stats, enforce_eager$"),
        LLM(model=str(folder), speculative_config=config, **ignored, **SIZES) as drafting,
    ):
        outputs = drafting.generate("ab" * 9, GREEDY, use_tqdm=False)
        metrics = {metric.name: metric for metric in drafting.get_metrics()}
    assert outputs[0].outputs == llm.generate("ab" * 9, GREEDY, use_tqdm=False)[0].outputs
    assert metrics["vllm:spec_decode_num_drafts"].value > 0
    per_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value == sum(per_position)


def test_cached_prefixes(llm):
    assert llm.reset_prefix_cache()
    prompts = ["a" * 20 + end for end in "bcc"]
    found = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts[:2]]
    assert [output.num_cached_tokens for output in found] == [0, 16]
    assert llm.reset_prefix_cache()
    (again,) = llm.generate(prompts[2], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 0 and again.outputs == found[1].outputs


# --- sampling parameters --------------------------------------------------------------------------


def test_positions_are_vllms():
    values = [2, 0.1, 0.2, 1.5, 0.5, 0.9, 3, 0.05, 11, ["x"], [4], True, 20, 1, 2, 3]
    names = (
        "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p "
        "seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs"
    ).split()
    assert SamplingParams(*values) == SamplingParams(**dict(zip(names, values, strict=True)))
    with pytest.raises(TypeError):
        SamplingParams(*values, False)


def test_none_is_what_was_left_out():
    names = "seed", "stop", "stop_token_ids", "bad_words", "logit_bias", "logits_processors"
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams() == SamplingParams(seed=-1)


def test_fields_are_assigned_and_checked_before_anything_is_generated(llm):
    params = SamplingParams(temperature=0, ignore_eos=True)
    params.max_tokens = 3
    params.stop_token_ids = None
    stream, copy = llm.generate_stream([1, 2], params), params.clone()
    copy.max_tokens = 9
    assert params.max_tokens == 3
    params.max_tokens = 2
    assert len([*stream][-1].outputs[0].token_ids) == 3  # a request has its own
    before = llm.metrics()
    params.top_p = 7.0
    refusal(lambda: llm.generate([1, 2], params, use_tqdm=False), "top_p=7.0")
    refusal(params.clone, "top_p=7.0")
    assert llm.metrics() == before
    with pytest.raises(AttributeError):
        params.max_token = 4


def test_truncated_prompts(llm):
    def ids(limit, **more):
        params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=limit)
        (output,) = llm.generate([list(range(1, 41))], params, use_tqdm=False, **more)
        return output.prompt_token_ids

    assert ids(3) == [38, 39, 40] and ids(60) == ids(None) == list(range(1, 41))
    assert ids(None, tokenization_kwargs={"truncate_prompt_tokens": 2}) == [39, 40]
    params = SamplingParams(max_tokens=8, truncate_prompt_tokens=-1)
    (output,) = llm.generate([[1] * 200], params, use_tqdm=False)
    assert len(output.prompt_token_ids) == llm.request_maker.config.max_model_len - 8


async def stream_async(folder, params):
    """Stream two prompts one after the other. A slow reader gets fewer outputs."""
    async with AsyncLLM(folder, **SIZES) as llm:
        return [one for ids in ([1, 2], [3]) async for one in llm.generate(ids, params, str(ids))]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_streams_give_what_output_kind_says(folder, llm, kind, is_async):
    params = SamplingParams(temperature=0, max_tokens=9, n=2, logprobs=1, ignore_eos=True)
    whole = llm.generate([[1, 2], [3]], params, use_tqdm=False)
    params.output_kind = kind
    again = llm.generate([[1, 2], [3]], params, use_tqdm=False)
    assert [one.outputs for one in again] == [one.outputs for one in whole]
    with simulated_engines(TextScript(VOCAB)):
        by_async = asyncio.run(stream_async(str(folder), params)) if is_async else None
    seen: dict = {}
    for output in by_async or llm.generate_stream([[1, 2], [3]], params):
        seen.setdefault(output.request_id, []).append(output)
    for outputs, expected in zip(seen.values(), whole, strict=True):
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        if kind is RequestOutputKind.FINAL_ONLY or not is_async:
            assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
        for i, sample in enumerate(expected.outputs):
            parts = [one for output in outputs for one in output.outputs if one.index == i]
            if kind is RequestOutputKind.DELTA:
                assert sum((part.token_ids for part in parts), []) == sample.token_ids
                assert sum((part.logprobs for part in parts), []) == sample.logprobs
                assert "".join(part.text for part in parts) == sample.text
            else:
                assert parts[-1] == sample


def test_the_checkpoints_parameters_are_the_defaults(llm, tmp_path):
    named = SamplingParams(temperature=0.5, top_k=7, max_tokens=5)
    llm.get_default_sampling_params().max_tokens = 9  # of a copy
    assert llm.get_default_sampling_params() == named
    assert len([*llm.generate_stream([1, 2])][-1].outputs[0].token_ids) <= 5
    assert read_default_params(tmp_path) == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"top_p": 3}')
    refusal(lambda: read_default_params(tmp_path), "generation_config.json: top_p=3")


def test_any_json_object():
    assert StructuredOutputsParams(json_object=True).json == {"type": "object"}
    refusal(lambda: StructuredOutputsParams(json_object=True, regex="a"), "exactly one")
    refusal(lambda: StructuredOutputsParams(json_object=False, regex="a"), "json_object=False")


# --- conversations --------------------------------------------------------------------------------


def test_what_a_template_is_given(llm):
    def prompt_of(content, more=(), **options):
        talk = [{"role": "user", "content": content}, *more]
        params = SamplingParams(max_tokens=1)
        return llm.chat(talk, params, use_tqdm=False, **options)[0].prompt

    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    template = TEMPLATE.replace("m.content", "m.content | length")
    assert prompt_of(parts[:1]) == prompt_of("hi") == "user:hi;me:"
    assert prompt_of(parts, chat_template=template) == "user:6;me:"
    options = {"chat_template": template, "chat_template_content_format": "openai"}
    assert prompt_of(parts, **options) == "user:2;me:"
    given = {"tools": [{"name": "a", "description": "<a>"}], "tool_choice": "none"}
    given |= {"chat_template_kwargs": {"enable_thinking": False}}
    shown = '[{"name": "a", "description": "<a>"}]'
    assert prompt_of("hi", **given) == f"user:hi;(no thinking){shown}me:"
    begun = [{"role": "assistant", "content": " The answer "}]
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of("hi", begun, **goes_on) == "user:hi;assistant: The answer "


def test_arguments_of_tool_calls_reach_the_template_parsed(llm):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2]}'}}
    talk = [{"role": "assistant", "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments.a[1] }}"
    assert llm.chat(talk, GREEDY, use_tqdm=False, chat_template=template)[0].prompt == "2"


def test_chats_with_several_templates(checkpoints, folder):
    listed = [("default", "plain"), ("tool_use", "{{ tools[0].name }}:")]
    made, tools = checkpoints.copy(folder), {"tools": [{"name": "f"}], "tool_choice": "none"}
    config = {"chat_template": [{"name": name, "template": text} for name, text in listed]}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    cases = ({}, "plain"), (tools, "f:"), (tools | {"chat_template": "default"}, "plain")
    with simulated_llm(made, script=TextScript(VOCAB)) as llm:
        for options, prompt in cases:
            talk = [{"role": "user", "content": "hi"}]
            assert llm.chat(talk, GREEDY, use_tqdm=False, **options)[0].prompt == prompt


def test_a_tokenizer_that_cuts_and_pads_changes_nothing(checkpoints, folder, llm):
    """Its truncation and padding do not affect prompts, chats, bad words or stop texts."""
    made = checkpoints.copy(folder)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=30, pad_id=LETTERS_EOS, pad_token="</s>")
    tokenizer.save(str(made / "tokenizer.json"))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (whole,) = llm.generate("What is two?", params, use_tqdm=False)
    params.stop, params.bad_words = whole.outputs[0].text[10:16], ["is two"]
    talk, found = [{"role": "user", "content": "What is two?"}], []
    with simulated_llm(made, script=TextScript(VOCAB)) as cutting:
        for one in llm, cutting:
            outputs = one.generate("What is two?", params, use_tqdm=False)
            outputs += one.chat(talk, params, use_tqdm=False)
            made_of = [(output.prompt_token_ids, output.outputs[0]) for output in outputs]
            found.append((one.make_request([1], params).bad_words, made_of))
    assert found[0] == found[1] and outputs[0].outputs[0].stop_reason == params.stop


def test_sleep(llm):
    before = llm.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs
    for level in 1, 2:
        llm.sleep(level)
        with pytest.raises(RuntimeError, match="wake_up"):
            llm.generate([1, 2], GREEDY, use_tqdm=False)
        llm.wake_up()
        assert llm.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs == before
    refusal(lambda: llm.sleep(3), "level=3")
    stream = llm.generate_stream([1, 2], GREEDY)
    next(stream)
    assert not llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="not finished"):
        llm.sleep()
    assert [*stream][-1].outputs == before and llm.reset_prefix_cache()


# --- options --------------------------------------------------------------------------------------


def test_options_without_effect_are_named_in_one_warning():
    given = {"swap_space": 4, "enforce_eager": True, "trust_remote_code": False, "sleepy": 1}
    with pytest.warns(UserWarning) as found:
        left = take_vllm_options(given)
    assert left == {"sleepy": 1} and len(found) == 1
    assert "swap_space, enforce_eager, trust_remote_code" in str(found[0].message)
    assert take_vllm_options({}) == {} and not PASSED_OVER & set(ONE_VALUE)
    assert not (PASSED_OVER | set(ONE_VALUE)) & set(LLM.__init__.__annotations__)


REFUSED = [
    *(("enable_lora", True), ("quantization", "awq"), ("pipeline_parallel_size", 2)),
    *(("load_format", "dummy"), ("generation_config", "vllm")),
    ("enable_lora", 0),
]


@pytest.mark.parametrize("name, value", REFUSED)
def test_options_that_would_change_more_are_refused(folder, name, value):
    refusal(lambda: LLM(folder, **{name: value}), f"{name}={value!r}")
