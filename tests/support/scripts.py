"""The tokens and drafts of a simulated device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

EMPTY = 1  # the digest of no tokens
NEXT, ACCEPTED, DRAFTED, MASK = range(4)  # what is drawn from a digest

# Returns the token after a slot's tokens and further tokens, by the request's options.
Next = Callable[[Any, list[int]], int]


def fold(digest: int, tokens: Sequence[int]) -> int:
    """Return the digest of the tokens with this digest, followed by `tokens`."""
    for token in tokens:
        digest = hash((digest, token))
    return digest


def draw(digest: int, seed: int, what: int, bound: int) -> int:
    """Return a number below `bound` that depends on the digest, the seed and `what`."""
    return (hash((digest, seed, what)) >> 24) % bound


def next_token(digest: int, seed: int, vocab_size: int) -> int:
    """Return the token after the tokens with this digest."""
    return draw(digest, seed, NEXT, vocab_size)


def mask_of(digest: int) -> int:
    """Return the first word of the grammar mask after the tokens with this digest.

    It differs for different tokens, so that a wrong mask is found.
    """
    return draw(digest, 0, MASK, 2**30)


class Script(Protocol):
    """Functions that determine the tokens and drafts of a simulated device."""

    def following(self, tokens: list[int], digest: int, seed: int) -> int:
        """Return the token after `tokens`, which have this digest. `seed` is 0 at temperature 0."""
        ...

    def draft(self, slot: Any, follow: Next, k: int, most: int) -> tuple[list[int], int]:
        """Return k drafts for a slot, and the number of valid drafts, which is at most `most`."""
        ...

    def mask(self, tokens: Sequence[int]) -> int:
        """Return the first word of a grammar's mask after the output `tokens`."""
        ...


@dataclass(frozen=True)
class HashScript:
    """Pseudo-random tokens and numbers of accepted drafts, from earlier tokens and the seed."""

    vocab_size: int
    drafts_fewer: bool = False  # whether a round may find fewer drafts than asked for

    def following(self, tokens: list[int], digest: int, seed: int) -> int:
        """See `Script`."""
        return next_token(digest, seed, self.vocab_size)

    def draft(self, slot: Any, follow: Next, k: int, most: int) -> tuple[list[int], int]:
        """See `Script`."""
        digest = int(slot.digests[len(slot.tokens)])
        if self.drafts_fewer:
            most = min(most, draw(digest, slot.seed, DRAFTED, k + 1))
        accepted = min(most, draw(digest, slot.seed, ACCEPTED, k + 1))
        truth: list[int] = []
        for _ in range(k):
            truth.append(follow(slot, truth))
        # The first rejected draft is wrong; later drafts do not matter.
        wrong = [(token + 1) % self.vocab_size for token in truth[accepted:]]
        return [*truth[:accepted], *wrong], most

    def mask(self, tokens: Sequence[int]) -> int:
        """See `Script`."""
        return mask_of(fold(EMPTY, tokens))


@dataclass(frozen=True)
class TextScript(HashScript):
    """Tokens that depend only on the last 8 tokens and the seed, not on weights.

    Drafters therefore do not change outputs.

    Args:
        ids: the possible tokens. A token that is listed several times is more frequent.
    """

    ids: Sequence[int] = ()

    def following(self, tokens: list[int], digest: int, seed: int) -> int:
        """See `Script`."""
        ids = self.ids or range(self.vocab_size)
        return ids[draw(fold(EMPTY, tokens[-8:]), seed, NEXT, len(ids))]


@dataclass(frozen=True)
class Echo(TextScript):
    """A model that repeats the last user message up to a semicolon, and then ends.

    The tokens are the printable ASCII characters, followed by the end of sequence. Prompts end with
    "A:", or with "A:<think>".
    """

    def following(self, tokens: list[int], digest: int, seed: int) -> int:
        """See `Script`."""
        prompt, _, said = "".join(chr(32 + token) for token in tokens).rpartition("A:")
        text = prompt.rpartition("user:")[2].partition(";")[0]
        number = len(said if "<think>" in text else said.removeprefix("<think>"))
        return ord(text[number]) - 32 if number < len(text) else self.vocab_size - 1
