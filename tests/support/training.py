"""Targets for tests of training, and the logits that drafters use in serving."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import softmax

from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.drafters.drafter import DraftContext, Drafter, Observation, Params, Variant
from specjax.device.edits import History
from specjax.device.models.model import Features, Model
from specjax.device.models.qwen3_5 import ATTENTION, DELTA
from specjax.device.requests import init_requests
from specjax.train.drafter import HeadSizes
from specjax.train.features import Batch
from specjax.train.target import demo_llama, demo_qwen3_5

VOCAB, LENGTH, AUX = 64, 24, (0, 1, 2)
TARGET = demo_llama(VOCAB, 3, 64)
HYBRID = replace(demo_qwen3_5(VOCAB, 2, 64), layer_types=(DELTA, ATTENTION))
HEAD_SIZES = HeadSizes(
    aux_layers=AUX, mask_token_id=7, num_heads=2, draft_vocab_size=32, markov_rank=8
)


def drafting(
    target: Model, drafter: Drafter, params: Params, batch: Batch, starts: jax.Array, k: int
) -> jax.Array:
    """Return the logits f32[N, k, V] of drafts after each of `starts` in a document.

    They are computed as in serving, but the document's tokens replace the drafts.
    """
    batch_size, kept = len(starts), []

    class Recorded(DraftContext):
        def draw(self, logits, ids, vocab_size, before, **options):
            kept.append(logits)
            return batch.tokens[0, starts + 1 + len(before)], None

        def draw_together(self, logits, *others, **options):
            kept.extend(logits.swapaxes(0, 1))
            return super().draw_together(logits, *others, **options)

    def wide(x):  # one document for all requests
        return jnp.tile(x[0], (batch_size, 1))

    table = jnp.arange(batch_size * 4, dtype=jnp.int32).reshape(batch_size, 4)
    tokens = jnp.tile(batch.tokens[:1], (batch_size, 1))
    seen = Observation(
        jnp.arange(batch_size),
        CachedRows.starting_at(jnp.zeros_like(starts), starts, LENGTH, table),
        tokens,
        jnp.roll(tokens, -1, axis=1),
        Features(wide(batch.hidden), wide(batch.auxiliary)),
        starts - 1,
        None,
    )
    state = drafter.init_state(CacheSizes(batch_size, batch_size * 4, 8, 1), jnp.float32)
    state = drafter.observe(target, params, state, seen)
    context = Recorded(
        slots=jnp.arange(batch_size),
        starts=starts,
        is_active=jnp.ones(batch_size, bool),
        page_table=table,
        requests=init_requests(batch_size, target.vocab_size),
        history=History(tokens, starts + 1),
        has_edits=jnp.array(False),
        kernels="auto",
        row_multiple=1,
        shares_noise=True,
        variant=Variant(),
    )
    drafter.draft(target, params, state, context, k)
    return jnp.stack(kept, axis=1)


def distance(teacher: Any, logits: Any) -> float:
    """Return cross-entropy + 4 * total variation of `logits` to the teacher's distribution.

    The cross-entropy leaves out tokens with a logit of -inf.
    """
    p, q = softmax(teacher), softmax(logits)
    kept = q > 0
    return 2 * np.abs(p - q).sum() - p[kept] @ np.log(q[kept])
