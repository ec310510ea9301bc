"""Data sets in their published formats. Errors about a file name the line and the field."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.refusals import refusal

from specjax.bench.datasets import DATASETS
from specjax.bench.datasets.queries import DatasetSettings, make_queries
from specjax.bench.workload import read_questions
from specjax.text.tokenizer import load_tokenizer

SPEC = {"question_id": 81, "category": "writing", "turns": ["Write a line.", "Now another."]}
# A row of each published format, and the message or the whole prompt that it asks for.
PUBLISHED = {
    "gsm8k": ({"question": "How many?", "answer": "Two #### 2"}, "How many?"),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": "..."},
        "def f(x):\n",
    ),
    "mt-bench": (SPEC | {"reference": ["a", "b"]}, "Write a line."),
    "spec-bench": (SPEC, "Write a line."),
    "custom": ({"prompt": "Go on", "output_tokens": 7}, "Go on"),
}


def settings(name, path=None, **options):
    own = options.pop("own", {})
    defaults = {"num_prompts": 1, "template_kwargs": {}}
    dataset = replace(DATASETS[name], **own)
    return DatasetSettings(name=name, dataset=dataset, path=path, **defaults | options)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture
def write(tmp_path):
    def make(*rows, name="rows.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        data = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return make


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_formats(name, write, tokenizer):
    row, text = PUBLISHED[name]
    path = write(row, name="rows.jsonl.gz" if name == "humaneval" else "rows.jsonl")
    (query,) = make_queries(settings(name, path), tokenizer).queries
    if name == "humaneval":
        expected = tokenizer.encode(text)
    else:
        messages = [{"role": "user", "content": text}]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert query.messages == messages
    assert query.token_ids == tuple(expected)
    assert query.group == row.get("category", "")
    assert query.output_len == row.get("output_tokens", 256)


def test_sharegpt_keeps_the_conversations_that_vllm_keeps(write, tokenizer):
    long, turns = "a b c d e f g h " * 200, []
    for number, answer in enumerate(["ok", "an answer of words", long * 3, "a second answer"]):
        prompt = f"question number {number} of many"
        turns.append([{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}])
    turns.append([{"from": "human", "value": "a question without an answer"}])
    rows = [{"id": str(i), "conversations": one} for i, one in enumerate(turns)]
    path = write(json.dumps(rows), name="share.json")
    found = make_queries(settings("sharegpt", path, num_prompts=9, seed=3), tokenizer)
    lengths = {tokenizer.encode(turns[i][1]["value"]).__len__() for i in (1, 3)}
    assert {query.output_len for query in found.queries} == lengths
    left_out, repeated = found.as_json()["notes"]
    assert left_out.startswith("3 of 5 conversations are left out")
    assert "has 2 rows, which are repeated for 9" in repeated


def test_categories_and_groups(write, tokenizer):
    path = write(SPEC, SPEC | {"category": "math"}, SPEC | {"category": "math"})
    found = make_queries(settings("spec-bench", path, num_prompts=3), tokenizer)
    assert found.groups == {"writing": 1, "math": 2}
    own = {"category": "math"}
    found = make_queries(settings("spec-bench", path, num_prompts=2, own=own), tokenizer)
    assert found.groups == {"math": 2}
    assert "1 rows of other categories are left out" in found.notes[0]


def test_random_prompts_have_their_lengths_and_share_prefixes(tokenizer):
    own = {"input_len": 40, "output_len": 20, "range_ratio": 0.5, "prefix_len": 5}
    found = make_queries(settings("random", num_prompts=200, own=own), tokenizer).queries
    lengths = [len(query.token_ids) - 5 for query in found]
    assert (min(lengths), max(lengths)) == (20, 60)
    assert 37 < sum(lengths) / len(lengths) < 43
    assert {query.token_ids[:5] for query in found} == {found[0].token_ids[:5]}
    outputs = [query.output_len for query in found]
    assert (min(outputs), max(outputs)) == (10, 30)
    again = make_queries(settings("random", num_prompts=200, own=own), tokenizer).queries
    assert again == found
    own = {"prefix_len": 6, "suffix_len": 3, "num_prefixes": 4}
    groups = make_queries(settings("prefix-repetition", num_prompts=8, own=own), tokenizer).queries
    assert all(len(query.token_ids) == 9 for query in groups)
    assert len({query.token_ids[:6] for query in groups}) == 4
    assert len({query.token_ids for query in groups}) == 8


def test_what_ships_needs_no_file_and_template_and_thinking_are_told(tokenizer):
    given = {"num_prompts": 24, "shuffles": False, "template_kwargs": {"enable_thinking": False}}
    found = make_queries(settings("gsm8k", output_len=9, **given), tokenizer)
    assert [query.messages[0]["content"] for query in found.queries] == read_questions()
    assert {query.output_len for query in found.queries} == {9}
    told = found.as_json()
    assert told["thinking"] == {"enable_thinking": False}
    assert told["chat_template"] == tokenizer.template
    plain = make_queries(settings("gsm8k", applies_template=False), tokenizer)
    assert plain.as_json()["chat_template"] is None
    query = plain.queries[0]
    assert query.token_ids == tuple(tokenizer.encode(query.text))


@pytest.mark.parametrize("name, row, words", [
    ("gsm8k", "{", ["line 2", "not JSON"]),
    ("gsm8k", "[1]", ["line 2", "list instead of an object"]),
    ("gsm8k", {"prompt": "a"}, ["line 2", "'question' must be a text", "prompt"]),
    ("humaneval", {"prompt": 5}, ["line 2", "'prompt' must be a text"]),
    ("mt-bench", {"turns": []}, ["line 2", "'turns' must be a list of texts"]),
    ("spec-bench", SPEC | {"category": 3}, ["line 2", "'category' is 3"]),
    ("sharegpt", {"id": "a"}, ["line 2", "'conversations' must be a list"]),
    ("sharegpt", {"conversations": [{"from": "human"}]}, ["line 2", "'value'"]),
    ("custom", {"text": "a"}, ["line 2", "one field of messages", "prompt"]),
    ("custom", {"prompt": "a", "turns": ["b"]}, ["line 2", "['prompt', 'turns']"]),
    ("custom", {"prompt": "a", "output_tokens": 0}, ["line 2", "'output_tokens' is 0"]),
    ("custom", {"prompt_token_ids": ["a"]}, ["line 2", "must be a list of token ids"]),
    ("custom", {"messages": ["a"]}, ["line 2", "must be a list of messages"]),
], ids=str)  # fmt: skip
def test_a_malformed_row_is_named(name, row, words, write, tokenizer):
    good = {"sharegpt": {"conversations": []}}.get(name, PUBLISHED.get(name, [None])[0])
    path = write(good, row)
    refusal(lambda: make_queries(settings(name, path), tokenizer), str(path), *words)


def test_a_missing_file_or_too_few_rows(write, tokenizer, tmp_path):
    for name, file in ("sharegpt", "ShareGPT_V3"), ("mt-bench", "FastChat"), ("custom", ".jsonl"):
        missing = settings(name)
        refusal(lambda: make_queries(missing, tokenizer), "--dataset-path is missing", file)  # noqa: B023
    none = settings("gsm8k", tmp_path / "none")
    refusal(lambda: make_queries(none, tokenizer), "cannot be read (No such file", "grade-school")
    few = settings("gsm8k", num_prompts=25, oversamples=False)
    refusal(lambda: make_queries(few, tokenizer), "--num-prompts 25", "has 24")
    empty = settings("custom", write())
    refusal(lambda: make_queries(empty, tokenizer), "has no rows")
    refusal(lambda: settings("gsm8k", input_len=4), "--input-len 4 goes with", "random")
    refusal(lambda: make_queries(settings("random"), None), "needs the tokenizer")
    wrong = {"category": "sport"}
    path = write(SPEC)
    of_none = settings("mt-bench", path, own=wrong)
    refusal(lambda: make_queries(of_none, tokenizer), "'sport' is not in the file", "writing")
