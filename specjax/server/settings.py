"""The settings of the HTTP server, which are also flags of `specjax serve`.

This module imports nothing slow, so that --help is fast.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specjax.checks import check_choice, check_count, check_positive, is_number
from specjax.messages.formats import FORMATS
from specjax.messages.template import ResponseTemplate
from specjax.vllm_names import CONTENT_FORMATS

SPEC_METRICS = ("none", "summary", "detailed")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper limits for clients. Each field's help says what happens beyond the limit."""

    max_body_bytes: int = _flag(2**24, "size of a request's body; beyond it: 413")
    max_pending_bytes: int = _flag(2**28, "size of all bodies being received; beyond it: 429")
    max_request_samples: int = _flag(1024, "prompts times n of a request; beyond it: 400")
    max_request_logprobs: int = _flag(
        2**23, "log-probabilities that a request may ask for; beyond it: 400"
    )
    max_stops: int = _flag(16, "stop texts of a request; beyond it: 400")
    max_stop_chars: int = _flag(1024, "characters of a stop text or bad word; beyond it: 400")
    max_token_ids: int = _flag(2**18, "ids in allowed_token_ids and similar; beyond it: 400")
    max_schema_bytes: int = _flag(2**18, "size of a schema or grammar; beyond it: 400")
    max_schema_seconds: float = _flag(10.0, "time to compile a schema or grammar; beyond it: 422")
    max_template_seconds: float = _flag(10.0, "time to render a chat template; beyond it: 400")
    max_queue_len: int = _flag(1024, "samples beyond those that run at a time; beyond it: 429")
    max_request_seconds: float | None = _flag(
        None, "time of a request; it then ends with its tokens so far, finish_reason abort"
    )
    max_stall_seconds: float = _flag(
        60.0, "time that a client may take to send its request, or not read its answer"
    )

    def __post_init__(self):
        for one in fields(self):
            value, name = getattr(self, one.name), f"--{one.name.replace('_', '-')}"
            if one.name.endswith("_seconds"):
                if value is not None and not (is_number(value) and value > 0):
                    raise ValueError(f"{name} {value} must be a number above 0")
            elif one.name == "max_queue_len":
                check_count(**{name: value})
            else:
                check_positive(**{name: value})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the server with vLLM's names. Limits are in `Limits`.

    Raises:
        ValueError: settings contradict each other or name unusable files.
    """

    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = _flag(8000, "port to listen on; 0 for a free one")
    uds: str | None = _flag(None, "path of a Unix socket to listen on, instead of host and port")
    root_path: str = _flag("", "prefix that a proxy in front removes from paths")
    served_model_name: tuple[str, ...] = _flag((), "names of the model for clients")
    api_key: tuple[str, ...] = _flag((), "keys; clients must send one of them")
    api_key_file: str | None = _flag(None, "a file with a key per line, which only you may read")
    allowed_origins: tuple[str, ...] = _flag((), "web origins whose pages may send requests")
    ssl_keyfile: str | None = _flag(None, "key for TLS, which only you may read")
    ssl_certfile: str | None = _flag(None, "certificate for TLS")
    ssl_ca_certs: str | None = _flag(None, "certificates that sign those of clients")
    ssl_cert_reqs: int = _flag(0, "client certificates: 0 none, 1 checked if sent, 2 needed")
    ssl_ciphers: str | None = _flag(None, "ciphers for TLS, in OpenSSL's format")
    uvicorn_log_level: str = _flag("info", f"one of {', '.join(LOG_LEVELS)}")
    disable_uvicorn_access_log: bool = _flag(False, "do not log a line per HTTP request")
    chat_template: str | None = _flag(
        None, "a file with a chat template, or the name of a template of the checkpoint"
    )
    response_template: str | None = _flag(
        None, "how tool calls and reasoning are written: a format's name, or a JSON file"
    )
    chat_template_content_format: str = _flag("auto", "see LLM.chat")
    default_chat_template_kwargs: Mapping[str, Any] | None = _flag(
        None, "further variables of chat templates, a JSON object"
    )
    trust_request_chat_template: bool = _flag(False, "let requests bring chat templates")
    enable_log_requests: bool = _flag(False, "log parameters and prompts of requests")
    max_log_len: int | None = _flag(None, "characters of a prompt that are logged; default: all")
    return_tokens_as_token_ids: bool = _flag(False, "tokens of logprobs are token_id:N")
    enable_force_include_usage: bool = _flag(False, "streams end with usage, asked for or not")
    enable_per_request_metrics: bool = _flag(False, "answers have the times of the request")
    per_request_spec_decode_metrics: str = _flag(
        "none", f"counts of drafts in answers, one of {', '.join(SPEC_METRICS)}"
    )
    enable_request_id_headers: bool = _flag(False, "answers have the header X-Request-Id")
    rl: bool = _flag(False, "let a trainer pause the engine and replace weights over HTTP")
    rl_weights_root: str | None = _flag(None, "folder below which --rl reads new weights")
    sse_keep_alive_interval: float = _flag(0.0, "seconds between comments in streams; 0: none")

    def __post_init__(self):
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port {self.port} must be in 0..65535")
        check_choice("--uvicorn-log-level", self.uvicorn_log_level, LOG_LEVELS)
        check_choice(
            "--per-request-spec-decode-metrics", self.per_request_spec_decode_metrics, SPEC_METRICS
        )
        check_choice(
            "--chat-template-content-format", self.chat_template_content_format, CONTENT_FORMATS
        )
        self._check_template()
        if self.uds is not None and (self.host, self.port) != ("127.0.0.1", 8000):
            raise ValueError("--uds listens on a Unix socket; leave out --host and --port")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile goes with --ssl-certfile, which is missing")
        if self.ssl_certfile is not None and self.ssl_keyfile is None:
            raise ValueError("--ssl-certfile goes with --ssl-keyfile, which is missing")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ValueError(f"--ssl-cert-reqs {self.ssl_cert_reqs} must be 0, 1 or 2")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("--ssl-cert-reqs goes with --ssl-ca-certs, which is missing")
        for name in "ssl_ca_certs", "ssl_ciphers":
            if getattr(self, name) is not None and self.ssl_certfile is None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} goes with --ssl-certfile, which is missing")
        if self.max_log_len is not None:
            check_count(**{"--max-log-len": self.max_log_len})
            if not self.enable_log_requests:
                raise ValueError("--max-log-len cuts what --enable-log-requests logs; add that")
        if not self.sse_keep_alive_interval >= 0:
            raise ValueError(
                f"--sse-keep-alive-interval {self.sse_keep_alive_interval} must be at least 0"
            )
        if not all(self.api_key):
            raise ValueError("--api-key is empty; leave it out, or give a key")
        if not all(self.served_model_name):
            raise ValueError("--served-model-name is empty; leave it out, or give a name")
        self._check_rl()
        for name in "ssl_keyfile", "api_key_file":
            if (path := getattr(self, name)) is not None:
                check_private(f"--{name.replace('_', '-')}", Path(path))

    def _check_template(self) -> None:
        given, kwargs = self.chat_template or "", self.default_chat_template_kwargs
        is_path = given.endswith((".jinja", ".jinja2", ".j2", ".json", ".txt")) or given[:1] == "/"
        if is_path and "{" not in given and not Path(given).is_file():
            raise ValueError(f"--chat-template {given} is not a file")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ValueError(f"--default-chat-template-kwargs {kwargs!r} must be a JSON object")

    def _check_rl(self) -> None:
        if self.rl_weights_root is not None:
            if not self.rl:
                raise ValueError("--rl-weights-root goes with --rl, which is missing")
            if not Path(self.rl_weights_root).is_dir():
                raise ValueError(f"--rl-weights-root {self.rl_weights_root} is not a folder")
        has_keys = self.api_key or self.api_key_file is not None
        if self.rl and self.host not in LOOPBACK and not has_keys:
            raise ValueError(
                f"--rl with --host {self.host} lets other machines replace the weights; add "
                "--api-key-file, or listen on 127.0.0.1"
            )

    def read_keys(self) -> tuple[str, ...]:
        """Return all valid keys; empty if clients need no key.

        Raises:
            ValueError: the file has no keys.
        """
        if self.api_key_file is None:
            return self.api_key
        lines = Path(self.api_key_file).read_text().splitlines()
        if not (keys := tuple(line.strip() for line in lines if line.strip())):
            raise ValueError(f"--api-key-file {self.api_key_file} has no keys")
        return (*self.api_key, *keys)

    def read_chat_template(self) -> str | None:
        """Return the chat template in the setting `chat_template`, or None.

        If the setting is the path of a file, return the file's text. Otherwise return the setting
        unchanged: it is a template if it contains "{", and else the name of a template.
        """
        given = self.chat_template
        if given is None or "{" in given or not Path(given).is_file():
            return given
        return Path(given).read_text()

    def read_response_template(self) -> str | Mapping[str, Any] | None:
        """Return the response template: a format's name, or the mapping in the setting's file.

        Return None if `response_template` is not set.

        Raises:
            ValueError: the setting is neither a format's name nor a file with a valid template.
        """
        given = self.response_template
        if given is None or given in FORMATS:
            return given
        try:
            template = json.loads(Path(given).read_bytes())
            ResponseTemplate.of(template)
        except OSError:
            names = ", ".join(FORMATS)
            text = f"--response-template {given} is neither a file nor one of {names}"
            raise ValueError(text) from None
        except ValueError as error:
            raise ValueError(f"--response-template {given}: {error}") from None
        return template


def check_private(name: str, path: Path) -> None:
    """Check that a file with a secret exists and that other users cannot read it.

    Raises:
        ValueError: the file is missing, or other users can read it.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ValueError(f"{name} {path} can be read by other users; chmod 600 {path}")
