"""The state that all endpoints of the server share: engine, settings and names of the model."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

from starlette.requests import Request

from specjax.async_llm import AsyncLLM
from specjax.messages.chat import ChatFormat
from specjax.server.admission import RETRY_SECONDS, Admission
from specjax.server.control import Control
from specjax.server.errors import APIError
from specjax.server.monitor import Monitor
from specjax.server.parameters import of_value
from specjax.server.rl_metrics import RLMetrics
from specjax.server.settings import Limits, ServerSettings
from specjax.server.wire import GenerationFields
from specjax.text.tokenizer import ChatTokenizer

LONG_BYTES = 2**18  # of a body; less is read in some tenths of a second
MAX_LONG = 16
Result = TypeVar("Result")
_LOG = logging.getLogger("specjax")


class Service:
    """The engine, the settings, and the names by which clients know the model.

    Args:
        model: the model as it was given to the engine. Clients know it by this name, unless
            `served_model_name` sets other names.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        model: str,
        settings: ServerSettings,
        limits: Limits,
    ):
        self.llm, self.settings, self.limits = llm, settings, limits
        self.names = settings.served_model_name or (model,)
        self.defaults = llm.get_default_sampling_params()
        self.max_model_len = llm.config.max_model_len
        self.chat_template = settings.read_chat_template()
        self.admission = Admission(llm.num_slots + limits.max_queue_len)
        self.control: Control | None = None
        if settings.rl:
            self.control = Control(llm, self.admission, settings.rl_weights_root)
        self.monitor = Monitor(llm, self.names[0], self.admission)
        if self.control is not None:
            self.monitor.registry.register(RLMetrics(self.control, self.monitor.families))
        self.num_pending_bytes = 0  # of bodies that are being received
        self._long_turn, self._num_long = asyncio.Lock(), 0
        self._tokenizer: ChatTokenizer | None = None
        self._folder: str | None = None
        try:
            own = llm.get_tokenizer()
        except ValueError:  # it has no tokenizer; requests of token ids can be served
            _LOG.warning("the checkpoint has no tokenizer; only prompts of token ids are served")
        else:
            self._folder, self._tokenizer = own.origin, replace(own, origin=self.names[0])

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The checkpoint's tokenizer.

        Raises:
            APIError: the checkpoint has no tokenizer.
        """
        if self._tokenizer is None:
            raise APIError(400, "the model has no tokenizer; send and read token ids")
        return self._tokenizer

    @cached_property
    def chat_format(self) -> Callable[[str], ChatFormat]:
        """A function that returns the `ChatFormat` for the text of a chat template."""
        template = self.settings.read_response_template()
        made = partial(ChatFormat, self.tokenizer, response_template=template)
        return lru_cache(maxsize=8)(made)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which are usually not part of a text."""
        added = self.tokenizer.tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @property
    def versions(self) -> list[int]:
        """All versions of the weights so far; empty without `rl`."""
        return [] if self.control is None else self.control.weights.versions

    def max_prompt_tokens(self, request: GenerationFields) -> int | None:
        """Return the maximum number of tokens per prompt; None if prompts will be truncated."""
        return self.max_model_len if request.truncate_prompt_tokens is None else None

    def public(self, text: str) -> str:
        """Replace the checkpoint's folder in an error's text by the model's name."""
        return text if self._folder is None else text.replace(self._folder, self.names[0])

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the response. `name` is the name in the request, or None.

        Raises:
            APIError: there is no model with this name.
        """
        if name is not None and name not in self.names:
            raise APIError(404, f"The model `{name[:200]}` does not exist.", "model")
        return name or self.names[0]

    async def in_thread(
        self, work: Callable[[], Result], request: Request, body: Any, param: str
    ) -> Result:
        """Run `work`, which reads texts of a request, in a thread. The event loop is not blocked.

        At most one thread works on a large body, so that small bodies need not wait for large ones.

        Raises:
            APIError: `work` raised a ValueError, or too many large bodies are waiting. The client
                sees the argument `param` as the wrong field, unless the ValueError names another
                field.
        """
        try:
            if request.state.num_bytes < LONG_BYTES:
                return await asyncio.to_thread(work)
            async with self._turn_of_long_work():
                return await asyncio.to_thread(work)
        except ValueError as error:
            raise of_value(error, body, param) from None

    @asynccontextmanager
    async def _turn_of_long_work(self) -> AsyncIterator[None]:
        if self._num_long == MAX_LONG:
            text = f"{MAX_LONG} requests with long texts are being read; try again later"
            raise APIError(429, text, retry_after=RETRY_SECONDS)
        self._num_long += 1
        try:
            async with self._long_turn:
                yield
        finally:
            self._num_long -= 1
