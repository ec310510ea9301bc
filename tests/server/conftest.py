"""A server with a tiny model on a simulated device, shared by the tests of a module."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from support.engines import ANY_SHAPES
from support.scripts import TextScript
from support.texts import simulated_llm

from specjax import LLM

# Nothing is collected where the server's packages are not installed.
if not all(find_spec(name) for name in ("starlette", "msgspec", "openai", "hypothesis")):
    collect_ignore_glob = ["test_*.py"]

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}answer:{% endif %}"


@pytest.fixture(scope="session")
def chat_folder(checkpoints):
    """A target with a tokenizer of letters and a chat template."""
    folder = checkpoints.with_letters(checkpoints.target("llama", eos_token_id=5).folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


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
