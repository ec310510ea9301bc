"""Decides how the responses of a chat are generated and read as messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
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

_PLAIN = ResponseTemplate.of(
    {
        "start_anchor_pattern": "(?!)",  # in no prompt
        "fields": {"content": {"content_args": {"strip": False}}},
    }
)


@dataclass(frozen=True)
class Response:
    """How the responses to one prompt are generated, with `params`, and read."""

    params: SamplingParams
    prompt: str
    template: ResponseTemplate
    choice: ToolChoice

    def parser(self) -> ResponseParser:
        """Return the parser of one sample."""
        return ResponseParser(
            self.template,
            prompt=self.prompt,
            schemas=self.choice.schemas,
            max_calls=None if self.choice.is_parallel else 1,
        )

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return an output whose samples have a message."""
        return replace(output, outputs=[self._with_message(sample) for sample in output.outputs])

    def _with_message(self, sample: CompletionOutput) -> CompletionOutput:
        if sample.text is None:
            return sample
        return replace(sample, message=self.parser().parse(sample.text))


class ChatFormat:
    """The format of a model's responses.

    Args:
        tokenizer: of the checkpoint. Its `response_template` has precedence over formats found by
            the chat template.
        chat_template: the text of the chat template.
        response_template: the name of a format in `FORMATS`, or a template as a mapping; None for
            the checkpoint's.

    Raises:
        ValueError: `response_template` is neither, or is malformed.
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
        signs = (
            (one, all(sign in chat_template for sign in one.signs)) for one in FORMATS.values()
        )
        known = next((one for one, is_found in signs if is_found), None)
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
        """Return how the responses to a rendered prompt are generated and read.

        Raises:
            ValueError: `choice` has functions whose calls cannot be read or forced, or forces calls
                while `params` have structured outputs.
        """
        template = self._template
        if choice.functions and (template is None or not template.has_part(CALLS)):
            raise ValueError(
                f"tools: the chat template of {self._origin} has no known format of tool calls; "
                f"pass response_template, as a mapping or one of {', '.join(FORMATS)}, or "
                "tool_choice='none'"
            )
        if template is None:
            return Response(params, prompt, _PLAIN, choice)
        if not choice.functions:
            template = template.without_calls()
        # What separates the parts of a message is often a special token.
        params = replace(params, skip_special_tokens=False, spaces_between_special_tokens=True)
        response = Response(params, prompt, template, choice)
        return self._forced(response) if choice.is_forced else response

    def _forced(self, response: Response) -> Response:
        choice, params = response.choice, response.params
        if self._form is None:
            raise ValueError(
                "tool_choice: no grammar is known for this model's format of tool calls; use 'auto'"
            )
        if params.structured_outputs is not None:
            raise ValueError(
                "structured_outputs and a tool_choice that forces calls exclude each other; leave "
                "one out"
            )
        begun = response.parser()
        can_begin = response.template.has_part("reasoning") and not begun.has_prefix
        is_reasoning = begun.part == "reasoning" or (None if can_begin else False)
        grammar = CallGrammar(self._form, self._special_ids).write(
            choice.functions, is_parallel=choice.is_parallel, is_reasoning=is_reasoning
        )
        forced = replace(params, structured_outputs=StructuredOutputs(grammar=grammar))
        return replace(response, params=forced)


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What a chat allows in responses, and how they are read.

    Attributes:
        tools: functions that the model may call, in OpenAI's form; None for none.
        tool_choice: "auto", "none", "required", or a function that has to be called, in OpenAI's
            form.
        parallel_tool_calls: whether there may be several calls.
        reasoning_effort: a variable of the chat template, like "low"; None for its default.
        response_template: see `ChatFormat`.

    Raises:
        ValueError: an option is malformed, or they contradict each other.
    """

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    response_template: str | Mapping[str, Any] | None = None
    choice: ToolChoice = field(init=False)

    def __post_init__(self):
        choice = read_tool_choice(self.tools, self.tool_choice, self.parallel_tool_calls)
        object.__setattr__(self, "choice", choice)
        effort = self.reasoning_effort
        if effort is not None and (not isinstance(effort, str) or not effort):
            raise ValueError(
                f"reasoning_effort={effort!r} must be a text that the chat template knows, like "
                "'low', 'medium' or 'high'"
            )

    @classmethod
    def split(cls, given: Mapping[str, Any]) -> "tuple[ChatOptions, dict[str, Any]]":
        """Return the options that are in a mapping, and the rest of the mapping."""
        names = {one.name for one in fields(cls) if one.init}
        rest = {name: value for name, value in given.items() if name not in names}
        return cls(**{name: value for name, value in given.items() if name in names}), rest

    def variables(self, given: Any) -> Any:
        """Return the variables `given` for a chat template, with the effort.

        Raises:
            ValueError: they have another effort.
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
    """Conversations as prompts, and how the response to each is generated and read."""

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
        variables: Any,
        chat_template: str | None = None,
        **rendering: Any,
    ) -> "Chat":
        """Render conversations, and decide how responses are read.

        Args:
            sampling_params: one for all conversations, or a list with one for each.
            variables: further variables of the chat template; None for none.
            rendering: further arguments of `render_conversations`.

        Raises:
            ValueError: an argument cannot be served.
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
        """Return outputs whose samples have messages."""
        return [one.read(output) for one, output in zip(self.responses, outputs, strict=True)]
