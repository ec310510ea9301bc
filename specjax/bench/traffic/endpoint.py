"""A client of an OpenAI endpoint. It records when each chunk of a response arrives."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from specjax.bench.datasets.queries import Query
from specjax.bench.traffic.forms import RequestForm
from specjax.bench.traffic.record import Record

_BUFFER = 2**23  # bytes of one line: a chunk may repeat the ids of a whole prompt
_CONNECTING_SECONDS = 10.0
_SHOWN = 300  # characters of a server's error


class EndpointGone(Exception):
    """Raised if nothing listens at the endpoint's address any more."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of a server, and the fields that all requests to it have.

    Args:
        base_url: scheme, host and port, with an optional prefix; "/v1/..." is appended.
        fields: fields of every body, such as temperature.
        headers: HTTP headers of every request, such as Authorization.
    """

    base_url: str
    model: str
    form: RequestForm
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"{self.base_url!r} is not a URL like http://127.0.0.1:8000")

    @property
    def root(self) -> str:
        """The base URL without a final /v1 or slash."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    def body(self, query: Query) -> dict[str, Any]:
        """Return the body of a streamed request."""
        return {
            "model": self.model,
            "max_tokens": query.output_len,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self.form.prompt(query),
            **self.fields,
        }


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Return a session that limits neither the number of connections nor the time of a response."""
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECTING_SECONDS),
        read_bufsize=_BUFFER,
    )


async def ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, query: Query, record: Record
) -> None:
    """Send a request, and fill in the record while the response arrives.

    If the request fails, the record gets the error, and keeps the chunks that arrived before.

    Raises:
        EndpointGone: no connection could be opened.
    """
    body, url = json.dumps(endpoint.body(query)).encode(), endpoint.root + endpoint.form.path
    reader = _Reader(endpoint.form, record)
    start = time.perf_counter()
    try:
        async with session.post(
            url, data=body, headers={"content-type": "application/json"}
        ) as response:
            if response.status != 200:
                text = await response.text(errors="replace")
                record.error = f"status {response.status}: {_message(text)}"
                return
            async for line in response.content:
                if line.startswith(b"data:"):
                    reader.read(line[5:].strip(), time.perf_counter() - start)
        record.latency = time.perf_counter() - start if reader.last is None else reader.last
        if record.error is None and not reader.has_ended:
            record.error = "the answer ended early"
    except aiohttp.ClientConnectorError as error:
        record.error = f"no connection: {error}"
        raise EndpointGone from error
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"[:_SHOWN]
    finally:
        reader.finish()


class _Reader:
    """Reads the events of one stream into a record."""

    def __init__(self, form: RequestForm, record: Record):
        self._form, self._record = form, record
        self._num_tokens = 0  # so far; 0 if the server does not say
        self._texts: list[str] = []
        self.last: float | None = None  # seconds to the latest chunk
        self._last_tokens: float | None = None
        self.has_ended = False

    def read(self, data: bytes, seconds: float) -> None:
        """Read an event that came `seconds` after the request was sent."""
        if data == b"[DONE]":
            self.has_ended = True
            return
        chunk, record = json.loads(data), self._record
        if error := chunk.get("error"):
            record.error = f"the server's error: {_message(json.dumps({'error': error}))}"
            return
        self._read_metrics(chunk.get("metrics") or {})
        num_new = self._count_new(chunk.get("usage") or {})
        choices = chunk.get("choices") or []
        if not choices:
            return
        choice = choices[0]
        text, ids = self._form.text(choice), choice.get("token_ids") or []
        self._texts.append(text)
        record.token_ids += ids
        found = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids")
        record.prompt_ids = found or record.prompt_ids
        self.last = seconds
        if not (text or ids or num_new):
            return  # only a role or a finish_reason
        if self._last_tokens is None:
            record.ttft = seconds
        else:
            record.gaps.append(seconds - self._last_tokens)
        self._last_tokens = seconds
        if num_new or ids:
            record.chunk_tokens.append(num_new or len(ids))

    def _count_new(self, usage: Mapping[str, Any]) -> int:
        """Return the number of tokens that a chunk adds; 0 if `usage` has no number of tokens."""
        record = self._record
        if usage.get("prompt_tokens"):
            record.prompt_len = usage["prompt_tokens"]
        num_new = (usage.get("completion_tokens") or 0) - self._num_tokens
        self._num_tokens += max(0, num_new)
        return max(0, num_new)

    def _read_metrics(self, metrics: Mapping[str, Any]) -> None:
        found = metrics.get("speculative_decoding") or {}
        if histogram := found.get("acceptance_histogram"):
            self._record.accepted = tuple(histogram)
            self._record.num_drafts = found.get("num_draft_tokens") or 0

    def finish(self) -> None:
        """Fill in the text and the number of tokens. Called when the stream has ended or failed."""
        record = self._record
        record.text = "".join(self._texts)
        num_chunks = len(record.gaps) + (record.ttft is not None)
        record.output_len = self._num_tokens or len(record.token_ids) or num_chunks
        if sum(record.chunk_tokens) != record.output_len:
            record.chunk_tokens = []  # the server did not count tokens per chunk


def _message(text: str) -> str:
    """Return the message in the JSON body of an error; the start of the body if it is not JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return text[:_SHOWN]
    value = value.get("error", value) if isinstance(value, dict) else value
    value = value.get("message", value) if isinstance(value, dict) else value
    return str(value)[:_SHOWN]
