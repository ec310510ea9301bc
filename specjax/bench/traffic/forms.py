"""The kinds of requests: completions and chats. A new kind is a class and a line in `FORMS`."""

from collections.abc import Mapping
from typing import Any, Protocol

from specjax.bench.datasets.queries import Query


class RequestForm(Protocol):
    """Writes the body of a request, and reads the text in the response."""

    path: str

    def prompt(self, query: Query) -> dict[str, Any]:
        """Return the fields that hold the prompt.

        Raises:
            ValueError: this form cannot hold the prompt.
        """
        ...

    def text(self, choice: Mapping[str, Any]) -> str:
        """Return the text that `choice`, from a chunk of the response, adds to the output."""
        ...


class Completions:
    """OpenAI's completions. Prompts are token ids if there is a tokenizer, else texts."""

    path = "/v1/completions"

    def prompt(self, query: Query) -> dict[str, Any]:
        """See `RequestForm`."""
        if query.token_ids is not None:
            return {"prompt": list(query.token_ids)}
        return {"prompt": query.text}

    def text(self, choice: Mapping[str, Any]) -> str:
        """See `RequestForm`."""
        return choice.get("text") or ""


class Chats:
    """OpenAI's chats. The server applies its chat template."""

    path = "/v1/chat/completions"

    def prompt(self, query: Query) -> dict[str, Any]:
        """See `RequestForm`."""
        if query.messages is not None:
            return {"messages": list(query.messages)}
        if query.text is not None:
            return {"messages": [{"role": "user", "content": query.text}]}
        raise ValueError(
            "--backend openai-chat sends messages, and the data set has token ids; use --backend "
            "openai"
        )

    def text(self, choice: Mapping[str, Any]) -> str:
        """Return the text that a choice of a chunk adds, including reasoning and tool calls."""
        delta = choice.get("delta") or {}
        calls = delta.get("tool_calls") or ()
        parts = [delta.get(name) for name in ("content", "reasoning", "reasoning_content")]
        parts += [(call.get("function") or {}).get("arguments") for call in calls]
        return "".join(filter(None, parts))


FORMS: Mapping[str, RequestForm] = {
    "openai": Completions(),
    "vllm": Completions(),  # vLLM has both names
    "openai-chat": Chats(),
}
