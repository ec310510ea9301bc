"""Reading, tokenizing and cutting lose no tokens, and a batch depends only on the step."""

import json

import numpy as np
import pytest

from specjax.train.data import (
    Document,
    packed_rows,
    padded_rows,
    read_documents,
    read_texts,
    shuffled_indices,
    train_tokenizer,
    window,
)


def _documents(lengths):
    tokens = np.arange(sum(lengths), dtype=np.int32)
    return [Document(part, 1) for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def test_every_token_of_an_epoch_is_seen_and_rows_overlap_by_one():
    documents = _documents([5, 9, 14, 3, 20, 13])
    batch, length = 3, 7
    steps = (64 - 1) // (batch * length)
    rows = np.concatenate([packed_rows(documents, s, batch, length, 0) for s in range(steps)])
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])
    assert len(set(rows[:, :-1].ravel())) == steps * batch * length


def test_an_epoch_has_its_own_order_and_the_same_step_the_same_rows():
    documents = _documents([8] * 8)
    first, again, other = (packed_rows(documents, s, 3, 7, 0) for s in (0, 0, 3))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_padded_rows_mark_answers_and_cut_what_does_not_fit():
    documents = [Document(np.array([7, 8, 9], np.int32), 2), Document(np.arange(10, 20), 1)]
    tokens, is_answer = padded_rows(documents, 5)
    np.testing.assert_array_equal(tokens, [[7, 8, 9, 0, 0], [10, 11, 12, 13, 14]])
    np.testing.assert_array_equal(is_answer, [[0, 0, 1, 0, 0], [0, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("num_tokens", "num_prompt", "kept"),
    [
        (6, 2, (0, 6)),  # all of it
        (12, 6, (4, 12)),  # the front of the prompt goes
        (12, 3, (2, 10)),  # all but its last token, and then the end of the answer
        (12, 0, (0, 8)),
    ],
)
def test_a_window_keeps_answers_before_prompts(num_tokens, num_prompt, kept):
    document = Document(np.arange(num_tokens), num_prompt)
    assert window(document, 8) == slice(*kept)


def test_shuffled_indices_cover_every_row_once_an_epoch():
    seen = np.concatenate([shuffled_indices(12, step, 4, 0) for step in range(3)])
    assert sorted(seen) == list(range(12))
    assert len(shuffled_indices(3, 0, 8, 0)) == 8


def test_tokenizer_round_trips_any_text_and_splits_digits():
    texts = ["Natalia sold 48/2 = 24 clips in May. <<48/2=24>>", "ünïcode ✓\n\ttabs"]
    tokenizer = train_tokenizer(texts, 300)
    for text in [*texts, "something else 12345"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    pieces = tokenizer.encode("12345").tokens
    assert pieces[0] == "<s>" and pieces[1:] == list("12345")


def test_documents_hold_prompt_answer_and_end(tmp_path):
    """Rows of text are tokenized. Regenerated answers keep their token ids."""
    rows = [{"question": "One?", "answer": "Yes 1."}, {"text": "plain"}]
    texts, answers = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    texts.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = train_tokenizer([f"{p}{a}" for p, a in read_texts([tmp_path])], 300)
    answers.write_text(json.dumps({"prompt_token_ids": [0, 5], "output_token_ids": [6, 1]}))
    asked, plain, given = read_documents([tmp_path], tokenizer)
    assert tokenizer.decode(asked.tokens[: asked.num_prompt].tolist()) == "Question: One?\nAnswer:"
    assert tokenizer.decode(asked.tokens[asked.num_prompt :].tolist()) == " Yes 1."
    assert asked.tokens[0] == 0 and asked.tokens[-1] == 1
    assert plain.num_prompt == 0
    assert given.tokens.tolist() == [0, 5, 6, 1] and given.num_prompt == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ('{"foo": 1}', r'a.jsonl:1.*"question"'), ("", "no documents")],
)
def test_bad_data_is_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_texts([path])
