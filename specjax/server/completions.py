"""The endpoint /v1/completions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from specjax.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from specjax.server.answers import Answer
from specjax.server.bodies import read_body
from specjax.server.errors import APIError
from specjax.server.jobs import Job, check_job, new_id
from specjax.server.logprobs import completion_logprobs, prompt_logprobs
from specjax.server.parameters import read_params
from specjax.server.rounds import RoundReports
from specjax.server.service import Service
from specjax.server.wire import CompletionChoice, CompletionLogprobs, CompletionRequest
from specjax.text.prompts import TokensPrompt


async def create_completion(request: Request) -> ASGIApp:
    """Answer a request of /v1/completions.

    Raises:
        APIError: the request is refused.
    """
    service: Service = request.app.state.service
    body = await read_body(request, CompletionRequest)
    service.admission.check(1)  # before any work on texts
    model = service.check_model(body.model)
    prompts = await service.in_thread(lambda: read_prompts(service, body), request, body, "prompt")
    # With max_tokens=0, an echo has only the prompt: the one token that is generated is dropped.
    is_only_echo = body.echo is True and body.max_tokens == 0
    asked = 1 if is_only_echo else body.max_tokens
    params = read_params(
        body,
        service.defaults,
        service.limits,
        max_tokens=service.defaults.max_tokens if asked is None else asked,
        logprobs=body.logprobs,
    )
    if body.echo:
        params = replace(params, prompt_logprobs=params.prompt_logprobs or body.logprobs)
    form = CompletionForm(service, body, prompts, params.n, is_only_echo=is_only_echo)
    name = new_id("cmpl", body)
    job = Job(name, model, prompts, params, body, form, "prompt", asked)
    await check_job(service, job)
    return Answer(service, job)


def read_prompts(service: Service, request: CompletionRequest) -> list[TokensPrompt]:
    """Return the prompts of a request.

    The request has a text, a list of token ids, a list of texts, or a list of lists of token ids.

    Raises:
        APIError: the list is empty or too long, or mixes texts and token ids.
        ValueError: a text is much too long.
    """
    given: Any = request.prompt
    listed: list[Any]
    if isinstance(given, str):
        listed = [given]
    elif given and all(isinstance(one, int) for one in given):
        listed = [given]
    else:
        listed = given
    kinds = {type(one) for one in listed}
    if len(kinds) != 1 or kinds == {int}:
        raise APIError(
            400, "prompt must be a text, token ids, or a list with one kind of these", "prompt"
        )
    if len(listed) > service.limits.max_request_samples:
        most = service.limits.max_request_samples
        raise APIError(400, f"prompt has {len(listed)} prompts; at most {most}", "prompt")
    if kinds == {list}:
        return [TokensPrompt(prompt_token_ids=ids) for ids in listed]
    adds = request.add_special_tokens is not False
    most = service.max_prompt_tokens(request)
    encode = partial(service.tokenizer.encode, add_special_tokens=adds, max_tokens=most)
    return [TokensPrompt(prompt=text, prompt_token_ids=encode(text)) for text in listed]


class CompletionForm:
    """Turns outputs into the choices of a completion response; see `AnswerForm`.

    The index of a choice counts the samples of all prompts: it is prompt index * n + sample index.
    """

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        prompts: Sequence[TokensPrompt],
        n: int,
        *,
        is_only_echo: bool,
    ):
        self._service, self._request, self._n = service, request, n
        self._is_only_echo = is_only_echo
        as_ids = request.return_tokens_as_token_ids
        self._as_ids = service.settings.return_tokens_as_token_ids if as_ids is None else as_ids
        self._prompts = prompts
        self._rounds = RoundReports(service.tokenizer) if request.return_rounds else None
        self._offsets: dict[int, int] = {}  # of the next token in its choice's text, by index

    def openings(self, prompt: int) -> Iterator[CompletionChoice]:
        """See `AnswerForm`."""
        return iter(())

    def parts(self, prompt: int, output: RequestOutput) -> Iterator[CompletionChoice]:
        """See `AnswerForm`."""
        for sample in output.outputs:
            yield self._choice(prompt, sample, output)

    def wholes(self, prompt: int, output: RequestOutput) -> Iterator[CompletionChoice]:
        """See `AnswerForm`."""
        for choice in self.parts(prompt, output):
            if self._request.prompt_logprobs is not None and output.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
            yield choice

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """See `AnswerForm`."""
        return {}

    def token_details(self) -> UnsetType:
        """See `AnswerForm`."""
        return UNSET

    def _choice(
        self, prompt: int, sample: CompletionOutput, output: RequestOutput
    ) -> CompletionChoice:
        """Return a choice with the new tokens of a sample.

        If the request has `echo`, the first choice of a sample begins with the prompt.
        """
        index = prompt * self._n + sample.index
        is_first = index not in self._offsets
        self._offsets.setdefault(index, 0)
        text, tokens = sample.text or "", sample.token_ids
        entries = None if sample.logprobs is None else [*sample.logprobs]
        if self._is_only_echo:
            text, tokens, entries = "", [], entries and []
        if self._request.echo and is_first:
            ids = output.prompt_token_ids
            text, tokens = self._echoed(prompt, ids) + text, [*ids, *tokens]
            entries = None if entries is None else [*(output.prompt_logprobs or []), *entries]
        choice = CompletionChoice(index, text, None, sample.finish_reason, sample.stop_reason)
        if entries is not None:
            choice.logprobs, self._offsets[index] = self._logprobs(
                tokens, entries, self._offsets[index]
            )
        if self._request.return_token_ids:
            choice.token_ids = sample.token_ids
            choice.prompt_token_ids = output.prompt_token_ids if is_first else UNSET
        if self._rounds is not None:
            choice.rounds = self._rounds.of(index, sample)
        return choice

    def _echoed(self, prompt: int, ids: list[int]) -> str:
        """Return the text of `ids`, the tokens of a prompt that the engine used.

        If the prompt was truncated, `ids` are only a part of its tokens.
        """
        given = self._prompts[prompt]
        if "prompt" in given and len(given["prompt_token_ids"]) == len(ids):
            return given["prompt"]
        return self._service.tokenizer.decode(ids)

    def _logprobs(
        self, tokens: list[int], entries: Sequence[TokenLogprobs | None], offset: int
    ) -> tuple[CompletionLogprobs, int]:
        shows_all = self._request.skip_special_tokens is False
        return completion_logprobs(
            tokens,
            entries,
            offset,
            decode=self._service.tokenizer.decode_token,
            hidden=() if shows_all else self._service.special_ids,
            as_ids=self._as_ids,
            has_top=bool(self._request.logprobs),
        )
