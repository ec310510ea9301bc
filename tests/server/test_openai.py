"""OpenAI's own client against a server of a real engine, with drafts."""

import asyncio
import json
import re
from functools import partial

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel, Field
from support.engines import K, assert_idle
from support.http import Served, served, until

from specjax import SamplingParams

MODEL = "few-words"
PROMPT = "Tom has 3 boxes of 12 eggs. How many eggs has he?"
HI = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def server(real):
    options = {"per_request_spec_decode_metrics": "detailed"}
    with served(real, model=MODEL, enable_per_request_metrics=True, **options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("options", [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 11, "n": 3},
    {"temperature": 0.9, "seed": 2**40, "stop": ["."], "extra_body": {"top_k": 20, "min_p": 0.1}},
    {"temperature": 0, "extra_body": {"min_tokens": 20, "include_stop_str_in_output": True}},
], ids=str)  # fmt: skip
def test_completions_are_those_of_generate(server, client, options):
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, **options}
    known = {k: v for k, v in options.items() if k != "extra_body"} | options.get("extra_body", {})
    expected = server.generate(PROMPT, SamplingParams(max_tokens=24, **known))[0].outputs
    answer = client.completions.create(**given)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert [c.finish_reason for c in answer.choices] == [one.finish_reason for one in expected]
    texts = [""] * len(expected)
    for chunk in client.completions.create(**given, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [one.text for one in expected]


def test_a_streamed_chat_has_usage_and_counts_of_drafts(client):
    options = {"model": MODEL, "messages": HI, "temperature": 1, "seed": 3}
    options |= {"max_completion_tokens": 48}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    *events, last = stream
    texts = [event.choices[0].delta.content for event in events]
    assert "".join(texts) == whole.choices[0].message.content
    usage, found = last.usage, last.model_extra["metrics"]
    assert not last.choices and usage.completion_tokens == whole.usage.completion_tokens <= 48
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0  # of the first answer
    counts = found["speculative_decoding"]
    assert counts["num_spec_tokens"] == K and sum(counts["acceptance_histogram"]) == len(
        counts["per_step_accepted"]
    )
    assert counts["num_accepted_draft_tokens"] == sum(counts["per_step_accepted"]) > 0
    assert counts["num_draft_tokens"] == sum(counts["per_step_drafted"])
    # The first token is of the prompt's step; each round has one more than it accepts.
    num_plain = usage.completion_tokens - 1 - counts["num_accepted_draft_tokens"]
    assert counts["num_spec_steps"] in (num_plain, num_plain - 1)  # the last may have no drafts
    assert found["time_to_first_token_ms"] >= found["queue_time_ms"] >= 0
    assert len(events) - 1 <= counts["num_spec_steps"] + 2  # at most one event per step


def test_logprobs_are_those_of_generate(server, client):
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    (one,) = server.generate(PROMPT, params)[0].outputs
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12, logprobs=3
    )
    found = answer.choices[0].logprobs
    own = [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
    assert found.token_logprobs == own and "".join(found.tokens) == one.text
    chat = client.chat.completions.create(
        model=MODEL, messages=HI, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    for entry in chat.choices[0].logprobs.content:
        top = [likely.logprob for likely in entry.top_logprobs]
        assert len(top) == 3 and top == sorted(top, reverse=True) and entry.logprob == top[0]
        assert bytes(entry.bytes).decode() == entry.token == entry.top_logprobs[0].token


class Sum(BaseModel):
    left: int = Field(ge=0, le=99)
    right: int = Field(ge=0, le=99)


@pytest.mark.slow
def test_structured_outputs(client):
    options = {"model": MODEL, "messages": HI, "max_tokens": 80, "seed": 3}
    parsed = client.chat.completions.parse(**options, response_format=Sum).choices[0]
    assert isinstance(parsed.message.parsed, Sum) and parsed.finish_reason == "stop"
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=30,
        extra_body={"structured_outputs": {"regex": "[0-9]{2} eggs"}},
    )
    assert re.fullmatch("[0-9]{2} eggs", answer.choices[0].text)
    formatted = client.chat.completions.create(
        **options | {"max_tokens": 100}, response_format={"type": "json_object"}
    )
    if formatted.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(formatted.choices[0].message.content), dict)


@pytest.mark.slow
def test_echoed_prompts_have_logprobs_as_lm_eval_reads_them(server, client):
    ids = server.llm.tokenizer.encode(PROMPT)
    answer = client.completions.create(
        model=MODEL, prompt=[ids], temperature=0, max_tokens=1, logprobs=1, echo=True, seed=1
    )
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    output = server.generate(ids, params)[0]
    (found,) = answer.choices
    expected = [
        entry[token].logprob
        for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert found.logprobs.token_logprobs[:-1] == [None, *expected]
    greedy = [max(top.values()) for top in found.logprobs.top_logprobs[1:]]
    assert all(g >= own for g, own in zip(greedy, found.logprobs.token_logprobs[1:], strict=True))
    only = client.completions.create(
        model=MODEL, prompt=[ids], max_tokens=0, logprobs=1, echo=True
    ).choices[0]
    assert only.logprobs.token_logprobs == found.logprobs.token_logprobs[:-1]
    assert found.text.startswith(only.text)


def test_errors_have_openais_classes(client):
    with pytest.raises(NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=-1)
    assert error.value.param == "temperature" and error.value.type == "BadRequestError"
    (model,) = client.models.list().data
    assert model.id == MODEL and model.model_extra["max_model_len"] == 128


def test_metrics_are_what_clients_counted(server, client):
    def read():
        lines = server.get("/metrics").body.decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    async def ask(count):
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as asked:
            made = asked.completions.create
            options = {"model": MODEL, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
            calls = [made(prompt=f"Question: {i}", **options) for i in range(count)]
            answers = await asyncio.gather(*calls)
            stream = await made(prompt=PROMPT, stream=True, **options)
            num_events = len([chunk async for chunk in stream])
            leaving = await made(prompt=PROMPT, stream=True, **options | {"max_tokens": 70})
            await anext(aiter(leaving))
            await leaving.close()
            return answers, num_events

    before = read()
    answers, num_events = asyncio.run(ask(6))
    until(lambda: not (server.service.monitor.num_open or server.llm.engine.has_work))
    assert_idle(server.llm)
    after = read()

    def gained(name, **labels):
        labels = sorted({"engine": "0", "model_name": MODEL, **labels}.items())
        inner = ",".join(f'{key}="{value}"' for key, value in labels)
        key = f"vllm:{name}{{{inner}}}"
        return after[key] - before.get(key, 0)

    assert sum(answer.usage.completion_tokens for answer in answers) == 6 * 16
    assert gained("request_success_total", finished_reason="length") == 7
    assert gained("request_success_total", finished_reason="abort") == 1
    assert 7 * 16 < gained("generation_tokens_total") < 8 * 16 + 100
    assert gained("request_generation_tokens_sum") == 7 * 16
    assert gained("e2e_request_latency_seconds_count") == 7
    assert gained("inter_token_latency_seconds_count") >= num_events - 1
    by_position = partial(gained, "spec_decode_num_accepted_tokens_per_pos_total")
    accepted = [by_position(position=i) for i in range(K)]
    assert 0 < sum(accepted) == gained("spec_decode_num_accepted_tokens_total")
    assert gained("num_requests_running") == 0
