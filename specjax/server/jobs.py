"""A request that is ready for the engine, with its prompts and parameters."""

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import UnsetType

from specjax.outputs import RequestOutput
from specjax.sampling_params import SamplingParams, StructuredOutputs
from specjax.server.errors import APIError
from specjax.server.service import Service
from specjax.server.wire import GenerationFields
from specjax.text.prompts import TokensPrompt

MAX_ID_CHARS = 200


class AnswerForm(Protocol):
    """Turns outputs into a response's choices, whose fields differ for completions and chats."""

    whole_object: str
    chunk_object: str

    def openings(self, prompt: int) -> Iterable[Any]:
        """Return the choices to stream before the first output of prompt number `prompt`."""
        ...

    def parts(self, prompt: int, output: RequestOutput) -> Iterable[Any]:
        """Return the choices to stream for an output, which has only new tokens of samples."""
        ...

    def wholes(self, prompt: int, output: RequestOutput) -> Iterable[Any]:
        """Return the choices for the finished samples of a prompt."""
        ...

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return, by name, additional fields of a response that is not streamed."""
        ...

    def token_details(self) -> dict[str, int] | UnsetType:
        """Return the fields of `usage.completion_tokens_details`; UNSET for none."""
        ...


@dataclass(frozen=True)
class Job:
    """A request's prompts and sampling parameters, and the form of its response."""

    id: str
    model: str
    prompts: list[TokensPrompt]
    params: SamplingParams
    request: GenerationFields
    form: AnswerForm
    prompt_field: str  # name of the field with the prompts, for errors
    asked_tokens: int | None  # max_tokens, if the request has it
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def ids(self) -> list[str]:
        """The ids of the engine's requests, one per prompt."""
        return [f"{self.id}-{i}" for i in range(len(self.prompts))]


def new_id(prefix: str, request: GenerationFields) -> str:
    """Return the id of a response: the prefix, and the request's `request_id` or a random UUID.

    Raises:
        APIError: the `request_id` is too long, or has characters that are not printable.
    """
    given = request.request_id
    if given and not (given.isprintable() and len(given) <= MAX_ID_CHARS):
        text = f"request_id={given[:80]!r} must be printable, of at most {MAX_ID_CHARS} characters"
        raise APIError(400, text, "request_id")
    return f"{prefix}-{given or uuid.uuid4().hex}"


async def check_job(service: Service, job: Job) -> None:
    """Check a job before it is submitted to the engine, and compile its grammar if it has one.

    Raises:
        APIError: there are too many samples or log-probabilities, a prompt and its output exceed
            the maximum context length, or the grammar is not supported or takes too long to
            compile.
    """
    num_samples, limit = len(job.prompts) * job.params.n, service.limits.max_request_samples
    if num_samples > limit:
        field = "n" if job.params.n > 1 else job.prompt_field
        raise APIError(400, f"{field}: {num_samples} samples are asked for; at most {limit}", field)
    _check_lengths(service, job)
    _check_logprobs(service, job)
    if isinstance(job.params.structured_outputs, StructuredOutputs):
        await _compile(service, job, job.params.structured_outputs)


def _check_lengths(service: Service, job: Job) -> None:
    """Refuse prompts that leave no room for the tokens that the request asks for."""
    limit, asked = service.max_model_len, job.asked_tokens
    for prompt in job.prompts:
        size = len(prompt["prompt_token_ids"])
        if (kept := job.params.truncate_prompt_tokens) is not None:
            size = min(size, limit - (asked or 1) if kept == -1 else kept)
        if size >= limit:
            text = f"{job.prompt_field} has {size} tokens; the model's maximum context length"
            raise APIError(400, f"{text}, with the answer, is {limit}", job.prompt_field)
        if asked is not None and size + asked > limit:
            name = job.request.renamed.get("max_tokens", "max_tokens")
            text = f"{name}={asked} is too large: {job.prompt_field} has {size} tokens, and the"
            raise APIError(400, f"{text} model's maximum context length is {limit}", name)


def _check_logprobs(service: Service, job: Job) -> None:
    """Refuse a request for more than `max_request_logprobs` log-probabilities."""
    params, limit, longest = job.params, service.limits.max_request_logprobs, service.max_model_len
    most = service.llm.config.max_logprobs  # -1 asks for this number
    per_token = {name: getattr(params, name) for name in ("logprobs", "prompt_logprobs")}
    per_token = {k: 1 + (most if n < 0 else n) for k, n in per_token.items() if n is not None}
    num_prompt = sum(min(len(one["prompt_token_ids"]), longest) for one in job.prompts)
    num_output = len(job.prompts) * params.n * (params.max_tokens or longest)
    asked = num_output * per_token.get("logprobs", 0)
    asked += num_prompt * per_token.get("prompt_logprobs", 0)
    if asked > limit:
        name = job.request.renamed.get("logprobs", "logprobs")
        raise APIError(
            400,
            f"{name}: up to {asked} log-probabilities are asked for; at most {limit}: lower it, "
            "max_tokens or n (--max-request-logprobs)",
            name,
        )


async def _compile(service: Service, job: Job, outputs: StructuredOutputs) -> None:
    name = job.request.renamed.get("structured_outputs", "structured_outputs")
    limit = service.limits.max_schema_seconds
    try:
        await asyncio.wait_for(service.llm.compile_grammar(outputs), limit)
    except TimeoutError:
        text = f"{name} takes more than {limit:g} s to compile (--max-schema-seconds)"
        raise APIError(422, text, name) from None
    except ValueError as error:
        raise APIError(422, service.public(str(error)), name) from None
