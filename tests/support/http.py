"""An HTTP server in a thread, and a client that can send any bytes."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from unittest.mock import patch

from support.engines import generate

from specjax import LLM, AsyncLLM, RequestOutput
from specjax.server.app import build_app
from specjax.server.run import Server, bind, make_server
from specjax.server.service import Service
from specjax.server.settings import Limits, ServerSettings

JSON = {"content-type": "application/json"}
LIMIT = 60  # seconds


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds. Fail after `LIMIT` seconds."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@dataclass(frozen=True)
class Answered:
    """A server's answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str | None]:
        """The status and the field `param` of an error. The error must have OpenAI's form."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == self.status
        assert len(error["message"]) < 700
        return self.status, error["param"]

    @property
    def events(self) -> list[Any]:
        """The events of a stream. The stream must end with "[DONE]"."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@dataclass
class Served:
    """A running server and its engine."""

    port: int
    service: Service
    server: Server

    @property
    def llm(self) -> LLM:
        return self.service.llm._llm

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, method: str, path: str, body: Any = None, headers: Any = JSON) -> Answered:
        """Send a request and read the whole answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        given = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, given, dict(headers))
        answer = connection.getresponse()
        read = Answered(
            answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        )
        connection.close()
        return read

    def post(self, path: str, body: Any, **headers: str) -> Answered:
        return self.send("POST", path, body, JSON | headers)

    def generate(self, prompts: Any, params: Any) -> list[RequestOutput]:
        """Call `LLM.generate` on the engine's thread."""
        call = self.service.llm._call(lambda: generate(self.llm, prompts, params))
        return call.result(LIMIT)

    def get(self, path: str) -> Answered:
        return self.send("GET", path, headers={})


@contextmanager
def served(
    llm: LLM, *, limits: Limits | None = None, model: str = "tiny", **settings: Any
) -> Iterator[Served]:
    """Run a server for an LLM inside the `with` block. The LLM is not closed at the end."""
    chosen = ServerSettings(port=0, disable_uvicorn_access_log=True, **settings)
    with patch("specjax.async_llm.LLM", lambda *_, **__: llm), patch.object(llm, "close"):
        engine = AsyncLLM("")
        service = Service(engine, model, chosen, limits or Limits())
        with bind(chosen) as bound:
            server = make_server(build_app(service), chosen)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
            thread.start()
            try:
                yield Served(bound.getsockname()[1], service, server)
            finally:
                server.should_exit = True
                thread.join(LIMIT)
                engine.shutdown()
        assert not thread.is_alive()
