"""What a simulated device knows of the requests in its slots, and of the rows of a round."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.scripts import EMPTY, fold


@dataclass
class Slot:
    """What the device knows of the request in a slot."""

    number: int
    tokens: list[int] = field(default_factory=list)
    digests: Any = None  # i64[...], of the first n tokens
    seed: int = 0
    prompt_length: int = 0
    limit: int = 0
    min_tokens: int = 0
    processor: int = -1  # number of its logits processors
    stop_ids: frozenset[int] = frozenset()
    length: int | None = None  # None before the first chunk
    observed: int = 0  # tokens that the drafter has observed
    is_active: bool = False
    # Of recurrent models:
    state: int = EMPTY  # the digest of the tokens that have been folded in
    ring: list[int] = field(default_factory=list)  # tokens of the last round
    pending: int = 0  # of those, how many stand and are still to be folded in

    def append(self, token: int) -> None:
        """Know one token more."""
        self.tokens.append(token)
        self.digests[len(self.tokens)] = fold(int(self.digests[len(self.tokens) - 1]), [token])


@dataclass(frozen=True)
class Row:
    """A row of a round between its parts."""

    slot: Slot
    start: int
    tables: np.ndarray  # that of most layers, and of each window
    num_drafts: int
    tokens: list[int]  # that stand: accepted drafts, and the one after them
    drafts: list[int]
