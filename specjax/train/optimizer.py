"""Optimisers: Muon with AdamW to train from scratch, and AdamW alone to refit trained weights."""

from collections.abc import Hashable
from typing import Any

import optax
import optax.contrib


def muon_and_adamw(labels: Any, peak: float, steps: int) -> optax.GradientTransformation:
    """Return Muon (Jordan 2024) for arrays labelled "muon", and AdamW for those labelled "adamw".

    The learning rate rises to `peak` over 1/25 of `steps`, then falls linearly to 2 % of `peak`.
    Muon's updates are scaled to AdamW's RMS, so that Muon and AdamW can use the same learning rate
    (Liu et al. 2025, eq. 4).
    """
    warmup = steps // 25 + 1
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.linear_schedule(peak, 0.02 * peak, steps - warmup),
        ],
        [warmup],
    )
    rules: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.contrib.muon(schedule, weight_decay=0.05, consistent_rms=0.2),
        "adamw": optax.adamw(schedule, b2=0.95, weight_decay=0.01),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(rules, labels))


def steady_adamw(rate: float, warmup: int = 10) -> optax.GradientTransformation:
    """Return AdamW with a rate that is constant after `warmup` steps, to refit trained weights.

    Muon is not used here, because it updates all directions of a matrix equally, including
    directions that are already right.
    """
    schedule = optax.linear_schedule(rate / warmup, rate, warmup - 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)
