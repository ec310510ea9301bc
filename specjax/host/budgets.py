"""What budgets of a step let run together."""

from specjax.config import EngineConfig


def explain_waiting(config: EngineConfig, max_drafts: int, draft_slots: int) -> str | None:
    """Which budget of exact mode lets fewer than `max_num_seqs` requests run together, and how
    large it must be; None if neither does.

    Every exact chunk takes its whole width, next to a whole round of all requests that decode.
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
