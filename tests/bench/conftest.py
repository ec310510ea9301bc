"""A tiny target with everything that `specjax bench` needs."""

import json
from pathlib import Path

import pytest

from specjax.bench.workload import read_questions
from specjax.train.data import CHAT_TEMPLATE, train_tokenizer

VOCAB = 300


@pytest.fixture(scope="session")
def files(checkpoints):
    return checkpoints.target(vocab_size=VOCAB)


@pytest.fixture(scope="session")
def folder(checkpoints, files) -> Path:
    """A copy of the tiny target, with a tokenizer and a chat template."""
    made = checkpoints.copy(files.folder)
    train_tokenizer(read_questions(), VOCAB).save(str(made / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made
