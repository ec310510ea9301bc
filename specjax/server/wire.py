"""The bodies of requests and responses, with the names of OpenAI's API and of vLLM.

A field of a request that is null counts as absent. Only types are checked here. `SamplingParams`
and `ChatOptions` check the values.
"""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class StreamOptions(Struct):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """Fields that completions and chats share.

    The fields up to `num_speculative_tokens` are passed to `SamplingParams` unchanged.
    """

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    logprob_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    stream_interval: int | None = None
    num_speculative_tokens: int | None = None

    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_rounds: bool | None = None

    @property
    def renamed(self) -> dict[str, str]:
        """Fields of `SamplingParams` that this request sets by a field of another name.

        The keys are the names in `SamplingParams`, and the values are the names in the request.
        """
        return {} if self.response_format is None else {"structured_outputs": "response_format"}


SAMPLING = GenerationFields.__struct_fields__[
    : GenerationFields.__struct_fields__.index("num_speculative_tokens") + 1
]


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None

    @property
    def renamed(self) -> dict[str, str]:
        """See `GenerationFields`."""
        names = {"logprobs": "top_logprobs"} | super().renamed
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names


class TokenizeRequest(Struct, kw_only=True):
    """The body of /tokenize: a prompt, or the fields of a conversation."""

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


class TokenizeReply(Struct):
    """The response body of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(Struct):
    """The response body of /detokenize."""

    prompt: str


class CachedTokens(Struct):
    """The number of prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class Usage(Struct):
    """The numbers of tokens of a request's prompts and outputs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: dict[str, int] | UnsetType = UNSET


class DraftRound(Struct):
    """The tokens of a round as texts: its accepted draft tokens, then one token of the target.

    `num_drafts` also counts the draft tokens that were rejected.
    """

    num_drafts: int
    tokens: list[str]


class CompletionLogprobs(Struct):
    """Log-probabilities of a completion: a list entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    """A sample of a completion, or a part of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    rounds: list[DraftRound] | UnsetType = UNSET


class TopLogprob(Struct):
    """One of the most likely tokens at a position of a chat."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """A token of a chat, with the most likely tokens at its position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat."""

    content: list[TokenLogprob]


class Delta(Struct):
    """An addition to some fields of a message. `tool_calls` are in OpenAI's form."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class Message(Struct):
    """The assistant's message in a chat response."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatDelta(Struct):
    """A choice in an event of a streamed chat: an addition to one sample."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    rounds: list[DraftRound] | UnsetType = UNSET


class ChatChoice(Struct):
    """A sample of a chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    rounds: list[DraftRound] | UnsetType = UNSET


class Reply(Struct, kw_only=True):
    """The response body of a completion or a chat, or one event of a streamed response."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice] | list[ChatDelta]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    metrics: dict[str, Any] | UnsetType = UNSET
    weight_versions: list[int] | UnsetType = UNSET
