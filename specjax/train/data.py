"""Reads documents, trains tokenizers, and batches documents into rows of tokens."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
TEXT_KEYS = "text", "question", "answer"
PROMPT = "Question: {question}\nAnswer:"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "Question: {{ message['content'] }}\nAnswer:{% else %} {{ message['content'] }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)


class Document(NamedTuple):
    """The tokens of a prompt and its answer.

    The first `num_prompt` tokens are the prompt; the other tokens are the answer to train on.
    """

    tokens: np.ndarray  # i32[n]
    num_prompt: int


def read_texts(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the pairs (prompt, answer) of texts in files or folders; see `read_rows`."""
    return [(row["prompt"], row["answer"]) for row in read_rows(paths) if "answer" in row]


def read_documents(
    paths: Sequence[Path], tokenizer: Tokenizer, eos_token: str = EOS
) -> list[Document]:
    """Return the documents in files or folders. Texts are tokenized as <s> prompt answer </s>.

    Raises:
        ValueError: as for `read_rows`, or the tokenizer has no end-of-sequence token.
    """
    eos = tokenizer.token_to_id(eos_token)
    documents = []
    for row in read_rows(paths):
        if "prompt_token_ids" in row:
            prompt, tokens = row["prompt_token_ids"], row["output_token_ids"]
            documents.append(Document(np.asarray([*prompt, *tokens], np.int32), len(prompt)))
            continue
        if eos is None:
            raise ValueError(
                f"the tokenizer has no token {eos_token!r} to end a document; name its end of "
                "sequence as eos_token in tokenizer_config.json"
            )
        num_prompt = len(tokenizer.encode(row["prompt"]).ids) if row["prompt"] else 0
        ids = tokenizer.encode(row["prompt"] + row["answer"]).ids
        documents.append(Document(np.asarray([*ids, eos], np.int32), num_prompt))
    return documents


def read_rows(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield a dict for each document in files or folders.

    Each row of a .jsonl file is a document. A row has "question" and "answer"; "text", which is an
    answer without a prompt; or "prompt_token_ids" and "output_token_ids". Any other file is one
    document without a prompt. In folders, all .jsonl, .txt and .py files are read, at any depth.

    A dict has the keys "prompt" and "answer", or "prompt_token_ids" and "output_token_ids".

    Raises:
        ValueError: a path does not exist, a row has another format, or there are no rows.
    """
    count = 0
    for path in _files(paths):
        if path.suffix != ".jsonl":
            yield {"prompt": "", "answer": path.read_text(errors="ignore")}
            count += 1
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a row must be a JSON object, got {line}")
            if bad := [k for k in TEXT_KEYS if not isinstance(row.get(k, ""), str)]:
                raise ValueError(f"{path}:{number}: {bad[0]}={row[bad[0]]!r} must be a text")
            count += 1
            if "text" in row:
                yield {"prompt": "", "answer": row["text"]}
            elif {"prompt_token_ids", "output_token_ids"} <= row.keys():
                yield row
            elif {"question", "answer"} <= row.keys():
                yield {"prompt": PROMPT.format(**row), "answer": " " + row["answer"]}
            else:
                raise ValueError(
                    f'{path}:{number}: a row needs "text", or "question" and "answer"; '
                    f"got {sorted(row)}"
                )
    if not count:
        raise ValueError(f"no documents in {', '.join(map(str, paths))}")


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"--data {path}: no such file or folder")
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        files += [f for f in found if f.suffix in (".jsonl", ".txt", ".py") or f == path]
    return [file for file in files if file.is_file()]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer that splits numbers into digits.

    Token 0 is <s>, and token 1 is </s>.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def packed_rows(
    documents: Sequence[Document], step: int, batch: int, length: int, seed: int
) -> np.ndarray:
    """Return the rows i32[batch, length + 1] of a training step.

    Each epoch concatenates the documents in a new order and splits the stream of tokens into rows
    that overlap by one token. The rows depend only on the arguments, so that a resumed run needs no
    other state.
    """
    total = sum(len(document.tokens) for document in documents)
    steps_per_epoch = max(1, (total - 1) // (batch * length))
    epoch, index = divmod(step, steps_per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(documents))
    stream = np.concatenate([documents[i].tokens for i in order])
    stream = np.resize(stream, max(total, steps_per_epoch * batch * length + 1))
    starts = (index * batch + np.arange(batch)) * length
    return stream[starts[:, None] + np.arange(length + 1)[None, :]]


def padded_rows(documents: Sequence[Document], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens i32[N, length] of truncated or padded documents, and a mask of answers.

    The mask bool[N, length] is true at tokens of answers.
    """
    tokens = np.zeros((len(documents), length), np.int32)
    is_answer = np.zeros((len(documents), length), bool)
    for row, document in enumerate(documents):
        count = min(len(document.tokens), length)
        tokens[row, :count] = document.tokens[:count]
        is_answer[row, document.num_prompt : count] = True
    return tokens, is_answer


def window(document: Document, length: int) -> slice:
    """Return the slice of a document that is kept for a row of `length` tokens.

    First, the beginning of the prompt is dropped, but never the last token of the prompt. Next, the
    end of the answer is dropped.
    """
    excess = max(0, len(document.tokens) - length)
    start = min(excess, max(0, document.num_prompt - 1))
    return slice(start, min(start + length, len(document.tokens)))


def shuffled_indices(count: int, step: int, batch: int, seed: int) -> np.ndarray:
    """Return the indices of a training step's rows.

    The order of the `count` rows is new in each epoch. Rows that do not fill a batch are left out.
    But if there are fewer rows than `batch`, rows are repeated to fill one batch.
    """
    steps_per_epoch = max(1, count // batch)
    epoch, index = divmod(step, steps_per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return np.resize(order, max(count, batch))[index * batch : (index + 1) * batch]
