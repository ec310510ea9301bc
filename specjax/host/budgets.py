"""Tracks how much of a step's token budgets is left, and warns of budgets that are too small."""

from dataclasses import dataclass

from specjax.config import EngineConfig


@dataclass
class Budget:
    """What is left of a step's two token budgets.

    Attributes:
        tokens: number of tokens that may still be scheduled.
        inputs: number of rows that may still run. This includes the extra rows for drafting.
        draft_slots: number of extra rows per sequence for drafting. As in vLLM (#34898), they count
            as `inputs` but not as `tokens`.
        num_spent: number of tokens that have been scheduled.
    """

    tokens: int
    inputs: int
    draft_slots: int
    num_spent: int = 0

    def fitting(self, wanted: int) -> int:
        """Return how many of `wanted` tokens the budgets allow for one more sequence."""
        return max(0, min(wanted, self.tokens, self.inputs - self.draft_slots))

    def take(self, count: int) -> bool:
        """Deduct the tokens of one sequence, and its extra rows for drafting.

        Return whether the budgets allow this. If not, nothing is deducted.
        """
        num_rows = count + self.draft_slots
        if count > self.tokens or num_rows > self.inputs:
            return False
        self.tokens -= count
        self.inputs -= num_rows
        self.num_spent += count
        return True

    def give_back(self, count: int) -> None:
        """Undo `take`, for a sequence that does not run after all."""
        self.tokens += count
        self.inputs += count + self.draft_slots
        self.num_spent -= count


def explain_waiting(config: EngineConfig, max_drafts: int, draft_slots: int) -> str | None:
    """Return a text that says which token budget lets too few requests run together, or None.

    With the option `exact`, each step needs room for the widest chunk of one request, and for a
    round of all other requests, up to `max_num_seqs`. Return None if both token budgets have this
    room. Without `exact`, return None, too.
    """
    if not config.exact:
        return None
    chunk, num_rows, count = config.prefill_shapes[0][1], max_drafts + 1, config.max_num_seqs
    for name, slots in ("max_num_scheduled_tokens", 0), ("max_num_batched_tokens", draft_slots):
        given, per_round = getattr(config, name), num_rows + slots
        together = 1 + (given - chunk - slots) // per_round
        if together < count:
            needed = chunk + slots + (count - 1) * per_round
            return (
                f"exact=True with {name}={given}: only {together} of max_num_seqs={count} requests "
                f"run together, as a chunk takes {chunk} tokens and the round of a request "
                f"{per_round}; raise {name} to {needed}, or lower max_num_seqs to {together}"
            )
    return None
