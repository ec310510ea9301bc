"""Bad requests are refused before the engine works; errors have a status and the field."""

import json

import pytest
from support.http import JSON, served

from specjax.messages.formats import FORMATS
from specjax.server.settings import Limits

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}

COMPLETION_CASES = [
    ({}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ["a", [1]]}, 400, "prompt"),
    ({"prompt": [[1], "a"]}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt.0"),
    ({"prompt": [96]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [2**70]}, 400, "prompt"),
    ({"prompt": "a" * 256}, 400, "prompt"),
    ({"prompt": ["a"] * 1025}, 400, "prompt"),
    ({"prompt": "a", "max_tokens": 256}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
    ({"prompt": "a", "n": 0}, 400, "n"),
    ({"prompt": "a", "n": 10**6}, 400, "n"),
    ({"prompt": "a", "n": 10**30}, 400, "n"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    ({"prompt": "a", "temperature": 1e40}, 400, "temperature"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p"),
    ({"prompt": "a", "top_k": -2}, 400, "top_k"),
    ({"prompt": "a", "min_p": 2}, 400, "min_p"),
    ({"prompt": "a", "seed": 2**64}, 400, "seed"),
    ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"prompt": "a", "min_tokens": 17}, 400, "min_tokens"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "a", "logprobs": True}, 400, "logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ({"prompt": "a", "stop": [""]}, 400, "stop"),
    ({"prompt": "a", "stop": ["a"] * 17}, 400, "stop"),
    ({"prompt": "a", "stop": "a" * 1025}, 400, "stop"),
    ({"prompt": "a", "stop": [1]}, 400, "stop.0"),
    ({"prompt": "a", "stop_token_ids": [1] * 9}, 400, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [500]}, 400, "stop_token_ids"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 1e40}}, 400, "logit_bias.1"),
    ({"prompt": "a", "logit_bias": {"500": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids"),
    ({"prompt": "a", "bad_words": ["\u00e9" * 9]}, 400, "bad_words"),
    ({"prompt": "a", "stream": "yes"}, 400, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
        400,
        "stream_options.include_usage",
    ),
    ({"prompt": "a", "priority": 3}, 400, "priority"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ({"prompt": "a", "guided_json": {}, "guided_regex": "a"}, 400, "guided_regex"),
    ({"prompt": "a", "use_beam_search": True}, 400, "use_beam_search"),
    ({"prompt": "a", "best_of": 3}, 400, "best_of"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format.type"),
    (
        {"prompt": "a", "response_format": {"type": "json_schema"}},
        400,
        "response_format.json_schema.schema",
    ),
    (
        {
            "prompt": "a",
            "response_format": {"type": "json_object"},
            "structured_outputs": {"regex": "a"},
        },
        400,
        "response_format",
    ),
    ({"prompt": "a", "structured_outputs": {}}, 400, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"rege": "a"}}, 400, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"choice": ["x" * 2**18]}}, 400, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"regex": "(a"}}, 422, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"grammar": "start: x"}}, 422, "structured_outputs"),
    (
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
        },
        422,
        "response_format",
    ),
    ({"prompt": "a", "model": "other"}, 404, "model"),
    ({"prompt": "a", "request_id": "a\nb"}, 400, "request_id"),
    ({"prompt": "a", "request_id": "a\u202eb"}, 400, "request_id"),
    ({"prompt": "a", "request_id": "a" * 201}, 400, "request_id"),
]
CHAT_CASES = [
    ({}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": ["hi"]}, 400, "messages.0"),
    ({"messages": [HI, {"role": "user"}]}, 400, "messages.1"),
    ({"messages": [{"content": "hi"}]}, 400, "messages.0"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages.0.content.0",
    ),
    ({"messages": [HI], "max_completion_tokens": 999}, 400, "max_completion_tokens"),
    ({"messages": [HI], "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"messages": [HI], "top_logprobs": 3}, 400, "top_logprobs"),
    ({"messages": [HI], "logprobs": True, "top_logprobs": 99}, 400, "top_logprobs"),
    ({"messages": [HI], "logprobs": 3}, 400, "logprobs"),
    ({"messages": [HI], "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    ({"messages": [HI], "chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs"),
    ({"messages": [HI], "continue_final_message": True}, 400, "continue_final_message"),
    ({"messages": [HI], "tools": [{"type": "function"}]}, 400, "tools.0.name"),
    ({"messages": [HI], "tools": [{"name": "f"}]}, 400, "tools"),  # the model has no format
    ({"messages": [HI], "tool_choice": "any"}, 400, "tool_choice"),
    ({"messages": [HI], "functions": [{}]}, 400, "functions"),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, 400, "messages"),
]
CASES = [(COMPLETIONS, *case) for case in COMPLETION_CASES] + [(CHAT, *case) for case in CHAT_CASES]


@pytest.mark.parametrize("path, body, status, param", CASES, ids=str)
def test_a_bad_field_is_named(server, path, body, status, param):
    num_steps = server.llm.metrics().num_steps
    answer = server.post(path, body)
    assert answer.error == (status, param), answer.body
    assert b"checkpoints" not in answer.body and str(server.llm.tokenizer.origin) not in str(
        answer.body
    )
    assert server.llm.metrics().num_steps == num_steps


BODIES = [
    (b"", JSON, 400),
    (b"{", JSON, 400),
    (b"[1]", JSON, 400),
    (b"\xff\xfe", JSON, 400),
    (b'{"prompt": "\\ud800"}', JSON, 400),
    (b'{"prompt": NaN}', JSON, 400),
    (b"[" * 10**5, JSON, 400),
    (b'{"prompt": "a"}', {}, 415),
    (b'{"prompt": "a"}', {"content-type": "text/plain"}, 415),
    (b'{"prompt": "' + b"a" * 2**24 + b'"}', JSON, 413),
]


@pytest.mark.parametrize("body, headers, status", BODIES, ids=lambda value: str(value)[:30])
def test_a_bad_body_is_refused(server, body, headers, status):
    assert server.send("POST", COMPLETIONS, body, headers).error[0] == status


@pytest.mark.parametrize("path, body, param", [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [HI]}, "prompt"),
    ("/tokenize", {"messages": [HI], "chat_template": "x"}, "chat_template"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
])  # fmt: skip
def test_tokens_that_cannot_be_made_or_read(server, path, body, param):
    assert server.post(path, body).error == (400, param)


def test_paths_and_methods_that_there_are_not(server):
    assert server.get("/v1/embeddings").error == (404, None)
    answer = server.get(COMPLETIONS)
    assert answer.error == (405, None) and answer.headers["allow"] == "POST"


def test_a_huge_value_gives_a_short_answer(server):
    """The error does not repeat the body, however often the body is wrong."""
    answer = server.post(COMPLETIONS, {"prompt": "a", "stop": ["x" * 900] * 15 + [""] * 9000})
    assert answer.error == (400, "stop") and len(answer.body) < 1000
    answer = server.post(COMPLETIONS, {"prompt": "a", "model": "m" * 10**6})
    assert answer.error == (404, "model") and len(answer.body) < 1000


def test_no_name_of_a_client_begins_a_line_of_the_log(server, caplog):
    caplog.set_level("WARNING")
    names = {"a\nb": 1, "\x1b[2J": 1, "\u2028": 1}
    server.post(COMPLETIONS, {"prompt": "a"} | names)
    server.post(CHAT, {"messages": [HI | names]})
    assert len(caplog.messages) == 2 and all(text.isprintable() for text in caplog.messages)


def test_a_format_of_calls_may_be_given(simulated, tmp_path):
    asked = {"messages": [HI], "max_tokens": 3, "tools": [{"function": {"name": "f"}}]}
    with served(simulated) as server:
        message = server.post(CHAT, asked).json["error"]["message"]
    assert "--response-template" in message and "qwen3_coder" in message
    file = tmp_path / "own.json"
    file.write_text(json.dumps(dict(FORMATS["qwen3"].template)))
    for given in "qwen3", str(file):
        with served(simulated, response_template=given) as server:
            assert server.post(CHAT, asked).status == 200


def test_a_schema_that_takes_too_long(simulated, monkeypatch):
    import time

    grammars = simulated.request_maker.grammars
    monkeypatch.setattr(type(grammars), "compile", lambda self, outputs: time.sleep(0.3))
    with served(simulated, limits=Limits(max_schema_seconds=0.05)) as server:
        body = {"prompt": "a", "structured_outputs": {"regex": "a"}}
        assert server.post(COMPLETIONS, body).error == (422, "structured_outputs")


def test_without_a_tokenizer_only_token_ids_are_served(checkpoints):
    from support.texts import simulated_llm

    with simulated_llm(checkpoints.target("llama").folder) as llm, served(llm) as server:
        answer = server.post(
            COMPLETIONS, {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": 1}
        )
        assert answer.error == (400, "return_token_ids")
        body = {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
        (choice,) = server.post(COMPLETIONS, body).json["choices"]
        assert len(choice["token_ids"]) == 3 and choice["text"] == ""
        assert server.post(COMPLETIONS, {"prompt": "a"}).error == (400, None)
        assert json.loads(server.post("/tokenize", {"prompt": "a"}).body)["error"]["code"] == 400
