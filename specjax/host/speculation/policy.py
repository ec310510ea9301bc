"""How many tokens to draft in a step."""

from dataclasses import dataclass
from typing import Protocol


class Policy(Protocol):
    """Chooses K when a step is scheduled; drafting and verifying use the same K."""

    @property
    def choices(self) -> tuple[int, ...]:
        """Every K that `choose` may return: what is compiled ahead."""
        ...

    def choose(self, batch_size: int) -> int:
        """K for a step of `batch_size` requests."""
        ...


@dataclass(frozen=True)
class StaticPolicy:
    """The same K always."""

    k: int

    @property
    def choices(self) -> tuple[int, ...]:
        """Just K."""
        return (self.k,)

    def choose(self, batch_size: int) -> int:
        """K, at any batch size."""
        return self.k
