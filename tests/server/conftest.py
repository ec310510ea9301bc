"""Tiny models with a chat template, and a server of one on a simulated device."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Checkpoints
from support.engines import ANY_SHAPES, make_llm
from support.scripts import TextScript
from support.shared_models import eagle3, llama, of_few_words
from support.texts import simulated_llm

from specjax import LLM

# Nothing is collected where the server's packages are not installed.
if not all(find_spec(name) for name in ("starlette", "msgspec", "openai", "hypothesis")):
    collect_ignore_glob = ["test_*.py"]

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}answer:{% endif %}"


def with_chats(checkpoints: Checkpoints, folder: Path) -> Path:
    """Return a copy of a target with a tokenizer of letters and a chat template."""
    made = checkpoints.with_letters(folder)
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return made


@pytest.fixture(scope="session")
def chat_folder(checkpoints):
    """A target for a simulated device."""
    return with_chats(checkpoints, checkpoints.target("llama", eos_token_id=5).folder)


@pytest.fixture(scope="session")
def real_folder(checkpoints):
    """A target for a real device."""
    return with_chats(checkpoints, of_few_words(checkpoints, llama(checkpoints).folder))


@pytest.fixture(scope="module")
def real(real_folder, checkpoints) -> Iterator[LLM]:
    """An LLM on a real device, with drafts, of which some are accepted."""
    head = of_few_words(checkpoints, eagle3(checkpoints).folder)
    with make_llm(real_folder, "eagle3", head) as llm:
        yield llm


@pytest.fixture(scope="module")
def simulated(chat_folder) -> Iterator[LLM]:
    """An LLM on a simulated device, with drafts."""
    options = {"max_model_len": 256, "max_num_seqs": 4, **ANY_SHAPES}
    with simulated_llm(chat_folder, "ngram", k=2, script=TextScript(96), **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(simulated) -> Iterator[Any]:
    """A server with the usual settings."""
    from support.http import served

    with served(simulated) as running:
        yield running
