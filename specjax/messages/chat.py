"""Prepares the sampling parameters of a chat's responses, and reads the responses as messages."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from specjax.messages.formats import FORMATS, CallForm
from specjax.messages.grammar import CallGrammar
from specjax.messages.parser import ResponseParser
from specjax.messages.template import CALLS, ResponseTemplate
from specjax.messages.tools import ToolChoice, read_tool_choice
from specjax.outputs import CompletionOutput, RequestOutput
from specjax.sampling_params import SamplingParams, StructuredOutputs
from specjax.text.chat import render_conversations
from specjax.text.prompts import TokensPrompt, params_each
from specjax.text.tokenizer import ChatTokenizer

_LOG = logging.getLogger("specjax")
_PLAIN = ResponseTemplate.of(
    {
        "start_anchor_pattern": "(?!)",  # in no prompt
        "fields": {"content": {"content_args": {"strip": False}}},
    }
)


@dataclass(frozen=True)
class Response:
    """The sampling parameters for responses to one prompt, and the template to read them with."""

    params: SamplingParams
    prompt: str
    template: ResponseTemplate
    choice: ToolChoice

    def parser(self) -> ResponseParser:
        """Return a new parser, which reads the text of one sample."""
        return ResponseParser(
            self.template,
            prompt=self.prompt,
            schemas=self.choice.schemas,
            max_calls=None if self.choice.is_parallel else 1,
        )

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return a copy of an output in which each sample with text also has a message."""
        return replace(output, outputs=[self._with_message(sample) for sample in output.outputs])

    def _with_message(self, sample: CompletionOutput) -> CompletionOutput:
        if sample.text is None:
            return sample
        return replace(sample, message=self.parser().parse(sample.text))


class ChatFormat:
    """The format in which a model writes tool calls and reasoning.

    Args:
        tokenizer: the checkpoint's tokenizer. If it has a `response_template`, this template
            determines how responses are read. Otherwise, the format is the first one in `FORMATS`
            whose `signs` (texts) all occur in the chat template.
        chat_template: the text of the chat template.
        response_template: the name of a format in `FORMATS`, or a template as a mapping; None to
            use the format of the tokenizer or the chat template.

    Raises:
        ValueError: `response_template` is an unknown name or a malformed mapping.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        chat_template: str,
        response_template: str | Mapping[str, Any] | None = None,
    ):
        added = tokenizer.tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: number for number, token in added if token.special}
        self._origin = tokenizer.origin
        known = next((one for one in FORMATS.values() if one.fits(chat_template)), None)
        if isinstance(response_template, str):
            if response_template not in FORMATS:
                raise ValueError(
                    f"response_template={response_template!r} must be a mapping or one of "
                    f"{', '.join(FORMATS)}"
                )
            known = FORMATS[response_template]
        own = tokenizer.response_template if response_template is None else response_template
        self._form: CallForm | None = None if known is None else known.form
        self._template: ResponseTemplate | None = None if known is None else known.parsed
        if own is not None and not isinstance(own, str):
            self._template = ResponseTemplate.of(own)

    def response(self, prompt: str, params: SamplingParams, choice: ToolChoice) -> Response:
        """Return the `Response` for a rendered prompt, with sampling parameters and template.

        Raises:
            ValueError: `choice` allows tool calls, but the model's format of calls is unknown. Or
                `choice` forces a call, but no grammar for calls is known, or `params` already have
                structured outputs.
        """
        template = self._template
        if choice.functions and (template is None or not template.has_part(CALLS)):
            raise ValueError(
                f"tools: the chat template of {self._origin} has no known format of tool calls; "
                "pass response_template (with specjax serve: --response-template), as a mapping "
                f"or one of {', '.join(FORMATS)}, or tool_choice='none'"
            )
        if template is None:
            return Response(params, prompt, _PLAIN, choice)
        if not choice.functions:
            template = template.without_calls()
        # What separates the parts of a message is often a special token.
        params = replace(params, skip_special_tokens=False, spaces_between_special_tokens=True)
        response = Response(params, prompt, template, choice)
        if choice.is_forced:
            return self._forced(response)
        return self._strict(response) if choice.is_strict else response

    def _strict(self, response: Response) -> Response:
        """Return a response whose calls must fit the schemas of their functions.

        If no grammar can ensure this, log a warning, and return `response` unchanged.
        """
        if self._form is None or not self._form.is_free:
            why = "no grammar is known for calls amid text in this model's format"
        elif response.params.structured_outputs is not None:
            why = "the request has structured outputs"
        else:
            return self._constrained(response)
        _LOG.warning("tools: strict is not enforced, because %s", why)
        return response

    def _forced(self, response: Response) -> Response:
        params = response.params
        if self._form is None:
            raise ValueError(
                "tool_choice: no grammar is known for this model's format of tool calls; use 'auto'"
            )
        if params.structured_outputs is not None:
            raise ValueError(
                "structured_outputs and a tool_choice that forces calls exclude each other; leave "
                "one out"
            )
        return self._constrained(response)

    def _constrained(self, response: Response) -> Response:
        """Return `response` with parameters that constrain its output to function calls."""
        assert self._form is not None
        choice, begun = response.choice, response.parser()
        can_begin = response.template.has_part("reasoning") and not begun.has_prefix
        is_reasoning = begun.part == "reasoning" or (None if can_begin else False)
        grammar = CallGrammar(self._form, self._special_ids).write(
            choice.functions,
            is_parallel=choice.is_parallel,
            is_reasoning=is_reasoning,
            is_forced=choice.is_forced,
        )
        outputs = StructuredOutputs(grammar=grammar)
        return replace(response, params=replace(response.params, structured_outputs=outputs))


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The tool calls that a chat allows, its reasoning effort, and the format of its responses.

    Attributes:
        tools: the functions that the model may call, in OpenAI's form; None if it may call none.
        tool_choice: "auto", "none", "required", or the one function that the model must call, in
            OpenAI's form.
        parallel_tool_calls: whether a response may have several calls.
        reasoning_effort: the value of the chat template's variable `reasoning_effort`, like "low";
            None for the template's default.
        response_template: see `ChatFormat`, which also checks it.

    Raises:
        ValueError: another option than `response_template` is malformed, or two options contradict
            each other.
    """

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    response_template: str | Mapping[str, Any] | None = None

    def __post_init__(self):
        _ = self.choice  # raises an error if it is malformed
        effort = self.reasoning_effort
        if effort is not None and (not isinstance(effort, str) or not effort):
            raise ValueError(
                f"reasoning_effort={effort!r} must be a text that the chat template knows, like "
                "'low', 'medium' or 'high'"
            )

    @cached_property
    def choice(self) -> ToolChoice:
        """The functions that the model may call, and whether it must call one."""
        return read_tool_choice(self.tools, self.tool_choice, self.parallel_tool_calls)

    @classmethod
    def split(cls, given: Mapping[str, Any]) -> "tuple[ChatOptions, dict[str, Any]]":
        """Return `ChatOptions` with the options in `given`, and a mapping with all other items."""
        names = {one.name for one in fields(cls)}
        rest = {name: value for name, value in given.items() if name not in names}
        return cls(**{name: value for name, value in given.items() if name in names}), rest

    def variables(self, given: Any) -> Any:
        """Add `reasoning_effort`, if it is set, to the chat template's variables `given`.

        None counts as an empty mapping. If `given` is not a mapping, it is returned unchanged.

        Raises:
            ValueError: the variables already have a different effort.
        """
        effort, given = self.reasoning_effort, {} if given is None else given
        if effort is None or not isinstance(given, Mapping):
            return given
        if given.get("reasoning_effort", effort) != effort:
            raise ValueError(
                f"reasoning_effort={effort!r}, and chat_template_kwargs has "
                f"{given['reasoning_effort']!r}; leave one out"
            )
        return {**given, "reasoning_effort": effort}


@dataclass(frozen=True)
class Chat:
    """A batch of conversations, rendered as prompts, with a `Response` for each prompt."""

    prompts: list[TokensPrompt]
    responses: list[Response]

    @classmethod
    def of(
        cls,
        tokenizer: ChatTokenizer,
        messages: Any,
        sampling_params: Any,
        options: ChatOptions,
        *,
        variables: Any = None,
        chat_template: str | None = None,
        **rendering: Any,
    ) -> "Chat":
        """Render conversations, and make a `Response` for each.

        Args:
            sampling_params: a `SamplingParams` for all conversations, or a list with one per
                conversation.
            variables: variables of the chat template besides `reasoning_effort`, or None.
            rendering: all other arguments of `render_conversations`.

        Raises:
            ValueError: an argument is malformed or not supported.
            CheckpointError: there is no chat template.
        """
        tools = options.tools
        prompts = render_conversations(
            tokenizer,
            messages,
            tools=tools,
            chat_template=chat_template,
            variables=options.variables(variables),
            **rendering,
        )
        template = tokenizer.find_template(chat_template, has_tools=tools is not None)
        known = ChatFormat(tokenizer, template, options.response_template)
        params = params_each(sampling_params, len(prompts))
        texts = [prompt.get("prompt", "") for prompt in prompts]
        responses = [
            known.response(text, one, options.choice)
            for text, one in zip(texts, params, strict=True)
        ]
        return cls(prompts, responses)

    @property
    def params(self) -> list[SamplingParams]:
        """The sampling parameters of each prompt."""
        return [response.params for response in self.responses]

    def read(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return copies of outputs in which each sample with text also has a message."""
        return [one.read(output) for one, output in zip(self.responses, outputs, strict=True)]
