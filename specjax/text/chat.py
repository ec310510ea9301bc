"""Checks conversations, and renders them to prompts with a checkpoint's chat template."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from specjax.sampling_params import check_text
from specjax.text.prompts import TokensPrompt
from specjax.text.tokenizer import ChatTokenizer
from specjax.vllm_names import CONTENT_FORMATS

MESSAGE_KEYS = (
    *("role", "content", "name", "tool_calls", "tool_call_id"),
    *("reasoning", "reasoning_content"),
)
TEXT_PARTS = ("text", "input_text", "output_text")
TEMPLATE_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")

Message = dict[str, Any]

_LOG = logging.getLogger("specjax")


def check_conversation(messages: Any, where: str, content_format: str = "auto") -> list[Message]:
    """Return a conversation's messages, with contents and tool calls as templates expect them.

    Args:
        messages: a list of mappings with "role" and "content". A content is a text, or a list of
            mappings {"type": "text", "text"}.
        where: the conversation's name in errors.
        content_format: "openai" turns every content except a tool's into a list of mappings.
            "string" and "auto" turn it into a text, joining the texts of a list with line breaks.

    Raises:
        ValueError: `content_format` is unknown, or no template could render the messages as
            intended.
    """
    if content_format not in CONTENT_FORMATS:
        raise ValueError(
            f"chat_template_content_format={content_format!r} is not supported; choose one of "
            f"{', '.join(CONTENT_FORMATS)}"
        )
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"{where}={messages!r} must be a list of messages, not empty")
    has_parts, unread = content_format == "openai", list[str]()
    checked = [
        _check_message(message, f"{where}[{i}]", unread, has_parts=has_parts)
        for i, message in enumerate(messages)
    ]
    if unread:  # without the arguments themselves, which are a user's
        text = "arguments of %d tool calls are not a JSON object, and are rendered as {}; first: %s"
        _LOG.warning(text, len(unread), unread[0])
    return checked


def _check_message(message: Any, where: str, unread: list[str], *, has_parts: bool) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f'{where}={message!r} must be a message, {{"role", "content"}}')
    if unknown := sorted(map(str, set(message) - set(MESSAGE_KEYS))):
        raise ValueError(
            f"{where} has the unknown key {unknown[0]!r}; messages have {', '.join(MESSAGE_KEYS)}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} needs a role, like 'user'; it has {role!r}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"{where} needs a content, a text or a list of texts")
    texts = _texts(content, f"{where}.content")
    checked = {**message, "content": "\n".join(texts)}
    if has_parts and role != "tool":  # few templates accept a tool's answer in parts
        checked["content"] = [{"type": "text", "text": text} for text in texts]
    if calls := checked.pop("tool_calls", None):
        checked["tool_calls"] = _parse_calls(calls, f"{where}.tool_calls", unread)
    return checked


def _parse_calls(calls: Any, where: str, unread: list[str]) -> list[Message]:
    """Return tool calls whose arguments are mappings, as templates expect, instead of JSON.

    Arguments that are not a JSON object become {}, and the name of their call, `where`[i], is
    appended to `unread`.

    Raises:
        ValueError: a call is not the call of a function.
    """
    parsed = []
    for i, call in enumerate(calls if isinstance(calls, Sequence) else [calls]):
        is_flat = isinstance(call, Mapping) and "function" not in call and "name" in call
        function = call if is_flat else call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or (call.get("type") or "function") != "function":
            raise ValueError(
                f'{where}[{i}]={call!r} must be a call of a function: {{"type": "function", '
                '"function": {"name", "arguments"}}'
            )
        arguments = _parse_arguments(function.get("arguments"))
        if arguments is None:
            unread.append(f"{where}[{i}]")
            arguments = {}
        whole = {**function, "arguments": arguments}
        parsed.append(whole if is_flat else {**call, "function": whole})
    return parsed


def _parse_arguments(given: Any) -> Mapping[str, Any] | None:
    """Return a call's arguments as a mapping; None if they are not a JSON object.

    A call with such arguments stays in the conversation's history, so an error would make all later
    turns fail. As in vLLM, the call is rendered without arguments.
    """
    found = given or {}
    if isinstance(found, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(found)
    return found if isinstance(found, Mapping) else None


def _texts(content: Any, where: str) -> list[str]:
    parts = [] if content is None else content
    if isinstance(parts, str):
        parts = [parts]
    if not isinstance(parts, Sequence) or isinstance(parts, bytes):
        raise ValueError(f"{where}={content!r} must be a text or a list of text parts")
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind not in TEXT_PARTS:
            raise ValueError(
                f"{where}[{i}] has the type {kind!r}, but models here read only text; leave it out"
            )
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValueError(f"{where}[{i}]={part!r} must have a text")
        check_text(f"{where}[{i}]", text)
        texts.append(text)
    return texts


def _without_developer(conversation: list[Message]) -> list[Message]:
    """Return the conversation for a template that does not have the role "developer".

    A conversation without messages of this role is returned unchanged. Otherwise, as in vLLM, the
    role becomes "system". All messages with the roles "developer" and "system" are merged into one
    message at the beginning, where templates expect it.
    """
    if all(message["role"] != "developer" for message in conversation):
        return conversation
    _LOG.info("the chat template has no role 'developer'; its messages are rendered as 'system'")
    told = [message for message in conversation if message["role"] in ("developer", "system")]
    others = [message for message in conversation if message not in told]
    if told == conversation[:1]:
        return [{**told[0], "role": "system"}, *others]
    texts = ["\n".join(_texts(message["content"], "content")) for message in told]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def render_conversations(
    tokenizer: ChatTokenizer,
    messages: Any,
    *,
    content_format: str,
    variables: Mapping[str, Any],
    max_tokens: int | None = None,
    **options: Any,
) -> list[TokensPrompt]:
    """Return a prompt for each conversation.

    `messages` is a conversation or a list of conversations. `variables` are passed to the template.
    `max_tokens` is for `ChatTokenizer.encode`, and `options` for
    `ChatTokenizer.apply_chat_template`.

    Raises:
        ValueError: `check_conversation` refuses a conversation, its prompt is too long, or a
            variable has the name of an argument of `ChatTokenizer.apply_chat_template`.
        CheckpointError: there is no chat template.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(
            f"messages={messages!r} must be a conversation, a list of "
            '{"role", "content"}, or a list of conversations'
        )
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise ValueError(f"chat_template_kwargs={variables!r} must be a mapping of names to values")
    if taken := sorted(set(variables) & {*TEMPLATE_VARIABLES, *options}):
        raise ValueError(
            f"chat_template_kwargs has {taken[0]!r}, an argument of chat itself; pass it there"
        )
    tools = options.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise ValueError(f"tools={tools!r} must be a list of JSON schemas, each a mapping")
    is_one = bool(messages) and isinstance(messages[0], Mapping)
    named = [("messages", messages)] if is_one else None
    named = named or [(f"conversation {i}", one) for i, one in enumerate(messages)]
    checked = [check_conversation(one, where, content_format) for where, one in named]
    template = tokenizer.find_template(options.get("chat_template"), has_tools=tools is not None)
    if "'developer'" not in template and '"developer"' not in template:
        checked = [_without_developer(conversation) for conversation in checked]
    prompts: list[TokensPrompt] = []
    for conversation in checked:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **variables, **options)
        ids = tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        prompts.append({"prompt": text, "prompt_token_ids": ids})
    return prompts
