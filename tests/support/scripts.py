"""What a simulated device plays: which token follows a history, and what is drafted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

EMPTY = 1  # the digest of no tokens
NEXT, ACCEPTED, DRAFTED, MASK = range(4)  # what is drawn from a digest

# The token that follows a slot's own tokens and those given, by its request's rules.
Next = Callable[[Any, list[int]], int]


def fold(digest: int, tokens: Sequence[int]) -> int:
    """The digest of a history that goes on with `tokens`."""
    for token in tokens:
        digest = hash((digest, token))
    return digest


def draw(digest: int, seed: int, what: int, bound: int) -> int:
    """A number below `bound` that hangs on a history and a seed."""
    return (hash((digest, seed, what)) >> 24) % bound


def next_token(digest: int, seed: int, vocab_size: int) -> int:
    """The token that follows a history."""
    return draw(digest, seed, NEXT, vocab_size)


def mask_of(digest: int) -> int:
    """What stands for the grammar's mask after a history: a word that no other history has."""
    return draw(digest, 0, MASK, 2**30)


class Script(Protocol):
    """Tokens and drafts as functions of what is known."""

    def following(self, tokens: list[int], digest: int, seed: int) -> int:
        """The token after a history; `seed` is 0 at temperature 0."""
        ...

    def draft(self, slot: Any, follow: Next, k: int, most: int) -> tuple[list[int], int]:
        """k drafts for a slot, and how many of the `most` that may stand were found."""
        ...

    def mask(self, tokens: Sequence[int]) -> int:
        """The first word of a grammar's mask after these tokens of an output."""
        ...


@dataclass(frozen=True)
class HashScript:
    """Tokens, and how many drafts of a round stand, hang on history and seed, as if by chance."""

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
        # Wrong where they part from the truth; then anything.
        wrong = [(token + 1) % self.vocab_size for token in truth[accepted:]]
        return [*truth[:accepted], *wrong], most

    def mask(self, tokens: Sequence[int]) -> int:
        """See `Script`."""
        return mask_of(fold(EMPTY, tokens))


@dataclass(frozen=True)
class TextScript(HashScript):
    """Tokens hang on the last few of the history, whatever the weights: drafters change nothing.

    Args:
        ids: of the tokens that follow, those that are to come more often more than once.
    """

    ids: Sequence[int] = ()

    def following(self, tokens: list[int], digest: int, seed: int) -> int:
        """See `Script`."""
        ids = self.ids or range(self.vocab_size)
        return ids[draw(fold(EMPTY, tokens[-8:]), seed, NEXT, len(ids))]


@dataclass(frozen=True)
class Echo(TextScript):
    """The model says what the last user says up to a semicolon, and then ends.

    Tokens are of printable ASCII, then of the end. Prompts end with "A:", or with "A:<think>".
    """

    def following(self, tokens: list[int], digest: int, seed: int) -> int:
        """See `Script`."""
        prompt, _, said = "".join(chr(32 + token) for token in tokens).rpartition("A:")
        text = prompt.rpartition("user:")[2].partition(";")[0]
        number = len(said if "<think>" in text else said.removeprefix("<think>"))
        return ord(text[number]) - 32 if number < len(text) else self.vocab_size - 1
