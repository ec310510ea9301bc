"""The endpoint /v1/chat/completions."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from specjax.messages.chat import ChatOptions, Response
from specjax.outputs import CompletionOutput, RequestOutput
from specjax.sampling_params import SamplingParams
from specjax.server.answers import Answer
from specjax.server.bodies import read_body, shown_names
from specjax.server.errors import APIError
from specjax.server.jobs import Job, check_job, new_id
from specjax.server.logprobs import chat_logprobs, prompt_logprobs
from specjax.server.messages import SampleMessage
from specjax.server.parameters import read_params
from specjax.server.rounds import RoundReports
from specjax.server.service import Service
from specjax.server.wire import (
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    Delta,
    TokenizeRequest,
)
from specjax.text.chat import MESSAGE_KEYS, render_conversations
from specjax.text.prompts import TokensPrompt

_LOG = logging.getLogger("specjax")
# A default that no generation_config.json has set; chats then get as many tokens as fit.
_UNSET_MAX_TOKENS = SamplingParams().max_tokens


async def create_chat(request: Request) -> ASGIApp:
    """Answer a request of /v1/chat/completions.

    Raises:
        APIError: the request is refused.
    """
    service: Service = request.app.state.service
    body = await read_body(request, ChatRequest)
    service.admission.check(1)  # before any work on texts
    model = service.check_model(body.model)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = read_params(
        body,
        service.defaults,
        service.limits,
        max_tokens=_default_max_tokens(service.defaults) if asked is None else asked,
        logprobs=_num_logprobs(body),
    )
    prompt, response = await service.in_thread(
        lambda: _prepare(service, body, params), request, body, "messages"
    )
    has_reasoning = body.include_reasoning is not False
    decode = partial(service.tokenizer.decode, skip_special_tokens=False)
    samples = [
        SampleMessage(response.parser(), decode, has_reasoning=has_reasoning)
        for _ in range(params.n)
    ]
    form = ChatForm(service, body, samples)
    name = new_id("chatcmpl", body)
    job = Job(name, model, [prompt], response.params, body, form, "messages", asked)
    await check_job(service, job)
    return Answer(service, job)


def _prepare(
    service: Service, request: ChatRequest, params: SamplingParams
) -> tuple[TokensPrompt, Response]:
    """Render a conversation. Return the prompt, and the `Response` for the prompt's outputs."""
    options = ChatOptions(
        tools=request.tools,
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
    )
    prompt = render(service, request, service.max_prompt_tokens(request))
    chosen, has_tools = request.chat_template or service.chat_template, request.tools is not None
    known = service.chat_format(service.tokenizer.find_template(chosen, has_tools=has_tools))
    return prompt, known.response(prompt.get("prompt", ""), params, options.choice)


def render(
    service: Service, request: ChatRequest | TokenizeRequest, max_tokens: int | None = None
) -> TokensPrompt:
    """Return a conversation as a prompt, rendered by a chat template.

    Raises:
        ValueError: the conversation or a variable of the template is refused, or the template takes
            too long, or the prompt has much more than `max_tokens` tokens.
        APIError: there are no messages, or the request has its own template, which the settings do
            not allow.
    """
    settings, own = service.settings, request.chat_template
    if own is not None and not settings.trust_request_chat_template:
        raise APIError(
            400,
            "chat_template is refused; start with --trust-request-chat-template",
            "chat_template",
        )
    options = ChatOptions(reasoning_effort=getattr(request, "reasoning_effort", None))
    asked = options.variables(request.chat_template_kwargs)
    variables = {**(settings.default_chat_template_kwargs or {}), **asked}
    if request.documents is not None:
        variables["documents"] = request.documents
    prompts = render_conversations(
        service.tokenizer,
        _known_keys(request.messages or []),
        content_format=settings.chat_template_content_format,
        variables=variables,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=request.continue_final_message is True,
        tools=request.tools,
        chat_template=own or service.chat_template,
        max_tokens=max_tokens,
        max_seconds=service.limits.max_template_seconds,
    )
    if not prompts:
        raise APIError(400, "messages is empty", "messages")
    if request.add_special_tokens:
        text = prompts[0].get("prompt", "")
        return TokensPrompt(prompt=text, prompt_token_ids=service.tokenizer.encode(text))
    return prompts[0]


def _known_keys(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without unknown keys, and log the names of these keys.

    A conversation can contain messages that the server has generated. Those messages have keys that
    templates do not need.
    """
    unknown = {key for one in messages for key in one if key not in MESSAGE_KEYS and one[key]}
    if unknown:
        _LOG.warning("messages have unknown keys, ignored: %s", shown_names(unknown))
    return [{key: one[key] for key in one if key in MESSAGE_KEYS} for one in messages]


def _default_max_tokens(defaults: SamplingParams) -> int | None:
    return None if defaults.max_tokens == _UNSET_MAX_TOKENS else defaults.max_tokens


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise APIError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    return None


class ChatForm:
    """Turns outputs into the choices of a chat response; see `AnswerForm`.

    Args:
        samples: a reader for the message of each sample.
    """

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        samples: Sequence[SampleMessage],
    ):
        self._request = request
        as_ids = request.return_tokens_as_token_ids
        self._as_ids = service.settings.return_tokens_as_token_ids if as_ids is None else as_ids
        self._samples = samples
        self._rounds = RoundReports(service.tokenizer) if request.return_rounds else None

    def openings(self, prompt: int) -> Iterator[ChatDelta]:
        """See `AnswerForm`."""
        for index in range(len(self._samples)):
            yield ChatDelta(index, Delta(role="assistant", content=""))

    def parts(self, prompt: int, output: RequestOutput) -> Iterator[ChatDelta]:
        """See `AnswerForm`."""
        for sample in output.outputs:
            message = self._samples[sample.index]
            delta = message.feed(sample.text or "", sample.token_ids)
            choice = ChatDelta(sample.index, delta, self._logprobs(sample))
            self._add_reports(choice, sample)
            if sample.finish_reason is None:
                yield choice
                continue
            last, reason = message.finish(sample.finish_reason)
            if last != Delta():
                yield choice
                choice = ChatDelta(sample.index, last)
            choice.finish_reason, choice.stop_reason = reason, sample.stop_reason
            yield choice

    def wholes(self, prompt: int, output: RequestOutput) -> Iterator[ChatChoice]:
        """See `AnswerForm`."""
        for sample in output.outputs:
            message, reason = self._samples[sample.index].parse(
                sample.text or "", sample.token_ids, sample.finish_reason
            )
            choice = ChatChoice(
                sample.index, message, self._logprobs(sample), reason, sample.stop_reason
            )
            self._add_reports(choice, sample)
            yield choice

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """See `AnswerForm`."""
        (output,) = outputs
        found: dict[str, Any] = {}
        if self._request.return_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return found

    def token_details(self) -> dict[str, int] | UnsetType:
        """See `AnswerForm`."""
        counts = [one.num_reasoning_tokens for one in self._samples]
        known = [count for count in counts if count is not None]
        return {"reasoning_tokens": sum(known)} if known else UNSET

    def _add_reports(self, choice: ChatDelta | ChatChoice, sample: CompletionOutput) -> None:
        if self._request.return_token_ids:
            choice.token_ids = sample.token_ids
        if self._rounds is not None:
            choice.rounds = self._rounds.of(sample.index, sample)

    def _logprobs(self, sample: CompletionOutput) -> ChatLogprobs | None:
        if sample.logprobs is None:
            return None
        num_top = self._request.top_logprobs or 0
        return chat_logprobs(
            sample.token_ids, sample.logprobs, num_top=num_top, as_ids=self._as_ids
        )
