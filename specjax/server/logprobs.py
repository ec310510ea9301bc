"""Log-probabilities in the shapes of OpenAI's completions and chats."""

from collections.abc import Callable, Iterator, Sequence
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
    as_ids: bool,
    has_top: bool,
) -> CompletionLogprobs:
    """Return the log-probabilities of a completion's tokens.

    Args:
        entries: an entry per token; None for the first token of a prompt.
        offset: index in the choice's text at which the first token begins.
        decode: returns the text of a token without an entry.
        as_ids: whether tokens are written as token_id:N.
        has_top: whether to report likely tokens, and not only the tokens themselves.
    """
    made = CompletionLogprobs([], [], [], [])
    for token, entry in zip(token_ids, entries, strict=True):
        own = None if entry is None else entry[token]
        is_first = own is None and not as_ids
        text = decode(token) if is_first else _name(token, own, as_ids=as_ids)
        made.text_offset.append(offset)
        made.tokens.append(text)
        made.token_logprobs.append(None if own is None else _number(own))
        top = {_name(id, one, as_ids=as_ids): _number(one) for id, one in (entry or {}).items()}
        made.top_logprobs.append(top if has_top and entry else None)
        offset += len(text)
    return made


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], *, num_top: int, as_ids: bool
) -> ChatLogprobs:
    """Return the log-probabilities of a chat's tokens, each with the `num_top` most likely."""
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


def _name(token: int, entry: Logprob | None, *, as_ids: bool) -> str:
    if as_ids or entry is None or entry.decoded_token is None:
        return f"token_id:{token}"
    return entry.decoded_token


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
