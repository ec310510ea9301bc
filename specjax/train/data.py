"""Text to token rows: reading documents, training the tokenizer, cutting epochs into batches."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
PROMPT = "Question: {question}\nAnswer:"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "Question: {{ message['content'] }}\nAnswer:{% else %} {{ message['content'] }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)


def read_documents(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """(prompt, answer) pairs of every file or folder named.

    A .jsonl row holds "question" and "answer", or "text" (a document without a prompt). Any other
    file is one document; a folder stands for all .jsonl, .txt and .py files below it.
    """
    documents = []
    for path in _files(paths):
        if path.suffix != ".jsonl":
            documents.append(("", path.read_text(errors="ignore")))
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            row = json.loads(line)
            if "text" in row:
                documents.append(("", row["text"]))
            elif "question" in row and "answer" in row:
                documents.append((PROMPT.format(**row), " " + row["answer"]))
            else:
                raise ValueError(
                    f'{path}:{number}: a row needs "text", or "question" and "answer"; '
                    f"got {sorted(row)}"
                )
    if not documents:
        raise ValueError(f"no documents in {', '.join(map(str, paths))}")
    return documents


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"--data {path}: no such file or folder")
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        files += [f for f in found if f.suffix in (".jsonl", ".txt", ".py") or f == path]
    return files


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with single digits, <s> as token 0 and </s> as token 1."""
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


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[tuple[str, str]]
) -> list[np.ndarray]:
    """Token ids of each document: <s> prompt answer </s>."""
    eos = tokenizer.token_to_id(EOS)
    encodings = tokenizer.encode_batch([prompt + answer for prompt, answer in documents])
    return [np.asarray([*encoding.ids, eos], np.int32) for encoding in encodings]


def batch_at(documents: Sequence[np.ndarray], step: int, batch: int, length: int, seed: int):
    """Rows i32[batch, length + 1] of training step `step`, a pure function of its arguments.

    Each epoch lays the documents end to end in a new order and cuts the stream into rows that
    overlap by one token, so that resuming at a step needs no other state.
    """
    total = sum(map(len, documents))
    steps_per_epoch = max(1, (total - 1) // (batch * length))
    epoch, index = divmod(step, steps_per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(documents))
    stream = np.concatenate([documents[i] for i in order])
    stream = np.resize(stream, max(total, steps_per_epoch * batch * length + 1))
    starts = (index * batch + np.arange(batch)) * length
    return stream[starts[:, None] + np.arange(length + 1)[None, :]]
