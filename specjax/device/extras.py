"""Optional work on logits in a step, in addition to sampling: edits and log-probabilities."""

from collections.abc import Callable
from enum import IntFlag
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.device.drafters.drafter import Variant
from specjax.device.edits import History, apply_processors
from specjax.device.logprobs import Logprobs, logprobs_of, pack_logprobs, token_logprobs
from specjax.device.requests import Requests
from specjax.device.sampling import process, scale, through_edits
from specjax.device.vocabulary import Vocabulary

SCORED_ROWS = 64  # number of prompt rows scored at a time, since their logits are large


class Extras(IntFlag):
    """Flags of a step's optional work on logits. Work that no request needs is skipped."""

    EDITS = 1  # edits of logits before sampling: penalties, bias, truncation, ...
    LOGPROBS = 2
    MASKS = 4  # grammar masks, an edit that drafting ignores


def extras_of_step(extras: jax.Array, variant: Variant) -> jax.Array:
    """Return a step's flags `Extras` as the bits of an i32[].

    All rows of `extras` i32[B] hold these flags. If `variant.is_plain`, the result is the constant
    0. Such steps contain no conditionals on the flags, so the optional work is not traced.
    """
    return jnp.int32(0) if variant.is_plain else extras[0]


class ExtraWork(NamedTuple):
    """Optional work on a step's logits f32[B, T, V]. Work that no request needs is skipped."""

    extras: jax.Array  # i32[], bits of `Extras`
    requests: Callable[[], Requests]  # returns B requests; called only if needed
    history: Callable[[], History]  # returns the history of B requests; called only if needed
    masks: jax.Array | None
    variant: Variant
    logprobs_mode: str  # see `StepModel`
    vocabulary: Vocabulary
    kernels: str

    @property
    def edits(self) -> jax.Array:
        """Whether any request needs its logits edited (penalties, bias, masks), bool[]."""
        return self.extras & (Extras.EDITS | Extras.MASKS) > 0

    @property
    def edit(self) -> Callable[[jax.Array], jax.Array] | None:
        """A function that edits logits as requests need, for example with penalties and masks.

        None if `variant.is_plain`. The function does not divide by the temperature. Users' logits
        processors, which come before these edits, have already run on its argument.
        """
        return None if self.variant.is_plain else self._edit

    def _edit(self, logits: jax.Array) -> jax.Array:
        return self._process(logits, self.requests(), self.history(), self.masks)

    def logprobs(self, raw: jax.Array, logits: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return log-probabilities of tokens i32[B, T], packed by `pack_logprobs`.

        `logprobs_mode` determines the distribution. `raw` are the model's logits. `logits` are the
        model's logits after logits processors. The result is zeros if no request needs it.
        """
        mode, num_top = self.logprobs_mode, self.variant.num_logprobs

        def report_drawn(edited):
            drawn = _scaled(edited, self.requests())
            return pack_logprobs(self._report(raw, drawn, tokens, num_top), len(tokens))

        def report():
            if mode == "raw":
                return pack_logprobs(self._report(raw, raw, tokens, num_top), len(tokens))
            return through_edits(report_drawn, logits, self.edit, self.edits)

        def nothing():
            return jnp.zeros(jax.eval_shape(report).shape, jnp.int32)

        if self.variant.is_plain:
            return nothing()
        return jax.lax.cond(self.extras & Extras.LOGPROBS > 0, report, nothing)

    def prompt_logprobs(
        self,
        logits_of: Callable[[jax.Array], jax.Array],
        hidden: jax.Array,
        known: jax.Array,
        starts: jax.Array,
    ) -> jax.Array:
        """Return log-probabilities of the token after each row of a chunk; see `pack_logprobs`.

        Output tokens are scored as in `logprobs`. Prompt tokens were not sampled, so they are
        scored with the raw logits.

        Args:
            logits_of: A function that returns logits f32[N, V] for hidden states [N, D].
            hidden: [B, T, D], the hidden states of the chunk's rows.
            known: i32[B, L], the prompt and output tokens of each request.
            starts: i32[B], the position of each request's first row.
        """
        requests, variant, mode = self.requests(), self.variant, self.logprobs_mode
        (batch, width), num_top = hidden.shape[:2], variant.num_prompt_logprobs
        assert num_top is not None
        count = max(1, SCORED_ROWS // batch)
        hidden = jnp.pad(hidden, ((0, 0), (0, -width % count), (0, 0)))
        blocks = hidden.reshape(batch, -1, count, hidden.shape[-1]).swapaxes(0, 1)

        def score(block):
            first, hidden = block
            lengths = starts + first + 1
            logits = logits_of(hidden.reshape(batch * count, -1))
            logits = processed = logits.reshape(batch, count, -1)
            places = lengths[:, None] + jnp.arange(count)[None]
            tokens = jnp.take_along_axis(known, places, axis=1, mode="clip")
            if mode != "raw":
                history = History(known, lengths)
                asked = requests, history
                processed = apply_processors(logits, *asked, variant.processors, self.vocabulary)
                processed = self._process(processed, *asked)
            is_prompt = places < requests.prompt_lengths[:, None]
            drawn = jnp.where(is_prompt[..., None], logits, _scaled(processed, requests))
            found = self._report(logits, drawn, tokens, num_top)
            return jax.tree.map(lambda x: x.reshape(batch, count, *x.shape[1:]), found)

        scored = jax.lax.map(score, (count * jnp.arange(len(blocks)), blocks))

        def rows(x):  # [blocks, B, count, ...] -> [N, ...]
            x = x.swapaxes(0, 1).reshape(batch, count * len(blocks), *x.shape[3:])[:, :width]
            return x.reshape(batch * width, *x.shape[2:])

        return pack_logprobs(jax.tree.map(rows, scored), batch)

    def _process(self, logits: jax.Array, *arguments: Any) -> jax.Array:
        return process(logits, *arguments, vocabulary=self.vocabulary, kernels=self.kernels)

    def _report(
        self, raw: jax.Array, drawn: jax.Array, tokens: jax.Array, num_top: int
    ) -> Logprobs:
        """Return the `Logprobs` of tokens i32[B, T], as `EngineConfig.logprobs_mode` defines them.

        `raw` are the model's logits. `drawn` are the logits from which tokens are sampled.
        """
        num_columns, mode = raw.shape[-1], self.logprobs_mode
        raw, drawn = raw.reshape(-1, num_columns), drawn.reshape(-1, num_columns)
        tokens = tokens.ravel()
        found = token_logprobs(raw if mode == "raw" else drawn, tokens, num_top, self.vocabulary)
        if mode != "both":
            return found
        return found._replace(raw=logprobs_of(raw, tokens, self.vocabulary))


def _scaled(processed: jax.Array, requests: Requests) -> jax.Array:
    """Return the logits `processed` [B, T, V], divided by each request's temperature."""
    num_rows, num_columns = processed.shape[1:]
    rows = processed.reshape(-1, num_columns)
    return scale(rows, requests.sampling.repeat(num_rows)).reshape(processed.shape)
