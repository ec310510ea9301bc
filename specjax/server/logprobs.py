"""Log-probabilities in the shapes of OpenAI's completions and chats."""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from specjax.outputs import Logprob, TokenLogprobs
from specjax.server.wire import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LEAST = -9999.0  # JSON has no -inf


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offset: int,
    *,
    decode: Callable[[int], str],
    hidden: Container[int],
    as_ids: bool,
    has_top: bool,
) -> tuple[CompletionLogprobs, int]:
    """Return the log-probabilities of a completion's tokens, and the offset of the next token.

    Args:
        entries: an entry per token; None for the first token of a prompt.
        offset: the index in the choice's text at which the first token begins.
        decode: a function that returns the text of a token; used for tokens without an entry.
        hidden: the ids of tokens that are not part of the text.
        as_ids: whether to write tokens as token_id:N instead of their text.
        has_top: whether to also report the most likely tokens at each position.
    """
    made = CompletionLogprobs([], [], [], [])
    for token, entry in zip(token_ids, entries, strict=True):
        own = None if entry is None else entry[token]
        text = decode(token) if own is None else _text(token, own)
        made.text_offset.append(offset)
        made.tokens.append(_id(token) if as_ids else text)
        made.token_logprobs.append(None if own is None else _number(own))
        top = {_name(id, one, as_ids=as_ids): _number(one) for id, one in (entry or {}).items()}
        made.top_logprobs.append(top if has_top and entry else None)
        offset += 0 if token in hidden else len(text)
    return made, offset


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], *, num_top: int, as_ids: bool
) -> ChatLogprobs:
    """Return the log-probabilities of a chat's tokens.

    Each token comes with the `num_top` most likely tokens at its position.
    """
    return ChatLogprobs(
        [
            TokenLogprob(
                name := _name(token, entry[token], as_ids=as_ids),
                _number(entry[token]),
                list(name.encode()),
                list(_most_likely(entry, num_top, as_ids=as_ids)),
            )
            for token, entry in zip(token_ids, entries, strict=True)
        ]
    )


def _most_likely(entry: TokenLogprobs, num_top: int, *, as_ids: bool) -> Iterator[TopLogprob]:
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    for token, one in ranked[:num_top]:
        name = _name(token, one, as_ids=as_ids)
        yield TopLogprob(name, _number(one), list(name.encode()))


def _name(token: int, entry: Logprob, *, as_ids: bool) -> str:
    return _id(token) if as_ids else _text(token, entry)


def _text(token: int, entry: Logprob) -> str:
    return _id(token) if entry.decoded_token is None else entry.decoded_token


def _id(token: int) -> str:
    return f"token_id:{token}"


def _number(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)


def prompt_logprobs(entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt's tokens as vLLM does: mappings by token id."""
    return [None if entry is None else _by_id(entry) for entry in entries]


def _by_id(entry: TokenLogprobs) -> dict[str, Any]:
    return {
        str(token): {"logprob": _number(one), "rank": one.rank, "decoded_token": one.decoded_token}
        for token, one in entry.items()
    }
