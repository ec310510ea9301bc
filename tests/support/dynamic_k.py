"""Policies, profiles and requests for tests of dynamic K."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax import SamplingParams
from specjax.host.request import Request
from specjax.host.speculation.policy import PolicyRule

PROFILE = {
    "is_online": False,
    "batch_stats": {"1": {"0": 1.0, "1": 1.1, "3": 1.3}, "4": {"0": 1.0, "1": 9.0, "3": 20.0}},
    "max_num_speculative_tokens": 3,
    "acceptance_rate_per_pos": [0.8, 0.6, 0.5],
}


def write_profile(folder: Path, **edits: Any) -> Path:
    """Write a file with `PROFILE`, in which `edits` replace fields."""
    path = folder / "profile.json"
    path.write_text(json.dumps(PROFILE | edits))
    return path


@dataclass
class Recording(PolicyRule):
    """A policy that computes K by a function of the load, and records loads and rounds."""

    choices: tuple[int, ...]
    choose_k: Any
    is_learning = True
    loads: list[Any] = field(default_factory=list)
    rounds: list[Any] = field(default_factory=list)

    def choose(self, load):
        self.loads.append(load)
        return self.choose_k(load)

    def observe(self, outcome):
        self.rounds.append(outcome)


class InTurn(PolicyRule):
    """A policy that repeats a list of Ks, one for each round."""

    def __init__(self, *ks: int):
        self.choices, self._ks, self._num_rounds = tuple(sorted(set(ks))), ks, 0

    def choose(self, load):
        self._num_rounds += load.num_sequences > 0
        return self._ks[self._num_rounds % len(self._ks)]


def requests_of(num_tokens: int, count: int = 2, first: int = 0) -> list[Request]:
    """Return greedy requests with prompts of three tokens. Each generates `num_tokens` tokens."""
    params = SamplingParams(temperature=0)
    return [Request(first + i, (1 + i, 2, 3), params, num_tokens, (i,)) for i in range(count)]
