"""DFlash2 (2026): DFlash with convolutions along the block, and with few candidates per draft.

In each layer, there is a convolution before and after attention, and before and after the MLP. A
convolution mixes row t of the block with the previous rows:

    y_t = sum_i (b_i + c_ti) x_{t-i}

The weights b_i are fixed for each channel. The weights c_ti are a linear function of the input of
attention or the MLP at row t. Adjacent channels form groups, and have equal c_ti within a group.

Drafts are chosen from a row's most likely tokens. Token j has the score

    s_j = l_j + sum_r P[previous]_r (H h)_r S[j]_r

where l_j is the token's logit, `previous` is the token before it, and h is the row's hidden state.
The matrices P, H and S are weights.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.spec import stored
from specjax.device.cache.paged import PagedAttention
from specjax.device.cache.rows import CachedRows
from specjax.device.drafters.dflash import Refinement
from specjax.device.models.decoder import DecoderLayer
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.residual import Residual
from specjax.device.models.layers.rope import Angles
from specjax.device.models.llama import Llama
from specjax.device.weights.matrix import Matrix, dense


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Convolution:
    """Weights of two convolutions: one before and one after an attention layer or MLP."""

    base: jax.Array  # [2, taps, D]
    projection: Matrix  # [D, 2 taps groups]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConvolvedLayer(DecoderLayer):
    """Weights of a decoder layer with convolutions."""

    attention_conv: Convolution
    mlp_conv: Convolution


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selector:
    """Weights that score candidate drafts; see the module's docstring."""

    previous: jax.Array  # P [V, r]
    candidates: jax.Array  # S [V, r]
    hidden: Matrix  # H [D, r]


class Candidates(NamedTuple):
    """The C tokens with the highest logits at each draft position.

    The selector scores only these candidates.
    """

    logits: jax.Array  # f32[B, K, C]
    ids: jax.Array  # i32[B, K, C]
    wanted: jax.Array  # H h [B, K, r], a factor in the candidates' scores


@dataclass(frozen=True, kw_only=True)
class DFlash2(Refinement):
    """The convolutions and the candidate selector of DFlash2; see `Refinement`."""

    num_taps: int
    group_size: int
    rank: int
    num_candidates: int
    multiplier: float  # multiplies the candidates' logits
    soft_cap: float | None  # c in c tanh(logit / c), which bounds the candidates' logits
    is_serial: ClassVar[bool] = True

    def specs(self, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> Selector:
        """See `Refinement.specs`."""
        name, codes = "candidate_selector", (vocab_size, self.rank)
        return Selector(
            previous=stored([f"{name}.predecessor_codebook"], codes),
            candidates=stored([f"{name}.successor_codebook"], codes),
            hidden=dense([f"{name}.hidden_projection.weight"], hidden_size, [self.rank]),
        )

    def layer_specs(self, shape: Llama, name: str) -> ConvolvedLayer:
        """See `Refinement.layer_specs`."""
        dim, plain = shape.hidden_size, shape.layer_specs(name)
        num_out = 2 * self.num_taps * (dim // self.group_size)

        def convolution(which: str) -> Any:
            stem = f"{name}.{which}_conv"
            return Convolution(
                base=stored([f"{stem}.base_kernel"], (2, self.num_taps, dim)),
                projection=dense([f"{stem}.kernel_projection.weight"], dim, [num_out]),
            )

        return ConvolvedLayer(
            **vars(plain),
            attention_conv=convolution("attention"),
            mlp_conv=convolution("mlp"),
        )

    def layer(
        self,
        params: ConvolvedLayer,
        stream: Residual,
        rows: Any,
        angles: Angles,
        kv: Any,
        index: jax.Array,
        shape: Llama,
        kind: PagedAttention,
    ) -> tuple[Residual, Any]:
        """See `Refinement.layer`."""

        x, normed = stream.normed(params.attention_norm, shape, rows.kernels)
        before, after = self._taps(params.attention_conv, normed)
        where = rows, angles, kv, index, kind
        mixed, kv = params.attention.mix(self._convolved(normed, before, rows), *where)
        stream = Residual(x, self._convolved(mixed, after, rows))
        x, normed = stream.normed(params.mlp_norm, shape, rows.kernels)
        before, after = self._taps(params.mlp_conv, normed)
        out = params.mlp.feed(self._convolved(normed, before, rows), shape, rows)
        return Residual(x, self._convolved(out, after, rows)), kv

    def _taps(self, params: Convolution, x: jax.Array) -> jax.Array:
        """Return the weights [2, taps, N, D] of two convolutions over rows x [N, D].

        A weight is the sum of a constant b_i and of a number c_ti that is computed from the row.
        """
        by_group = params.projection.multiply(x).reshape(len(x), 2, self.num_taps, -1)
        by_row = jnp.repeat(by_group, self.group_size, axis=-1).transpose(1, 2, 0, 3)
        return params.base[:, :, None] + by_row

    def _convolved(self, x: jax.Array, taps: jax.Array, rows: CachedRows) -> jax.Array:
        """Return x [N, D], convolved along each block's rows with weights `taps` [taps, N, D]."""
        blocks = rows.by_request(x)
        out = taps[0] * x
        for i in range(1, self.num_taps):
            before = jnp.pad(blocks, ((0, 0), (i, 0), (0, 0)))[:, : blocks.shape[1]]
            out += taps[i] * before.reshape(x.shape)
        return out

    def of_block(self, params: Selector, hidden: jax.Array, logits: jax.Array) -> Candidates:
        """Return the candidates of all drafts at once; see `Refinement.of_block`."""
        best, ids = jax.lax.top_k(logits, self.num_candidates)
        best = best * self.multiplier
        if self.soft_cap is not None:
            best = self.soft_cap * jnp.tanh(best / self.soft_cap)
        return Candidates(best, ids, params.hidden.multiply(hidden))

    def logits(self, params: Selector, block: Candidates, previous: jax.Array) -> jax.Array:
        """Return the candidates' scores, and -inf for other tokens; see `Refinement.logits`."""
        follows = jnp.einsum(
            "br,bcr->bc",
            params.previous[previous] * block.wanted,
            params.candidates[block.ids],
            preferred_element_type=jnp.float32,
        )
        batch, vocab_size = len(previous), len(params.candidates)
        none = jnp.full((batch, vocab_size), -jnp.inf, jnp.float32)
        return none.at[jnp.arange(batch)[:, None], block.ids].set(block.logits + follows)

    def trained(self, logits: jax.Array, refined: jax.Array) -> tuple[jax.Array, ...]:
        """Return the logits that select candidates, and the refined logits.

        See `Refinement.trained`.
        """
        return logits, refined


def read(hf: HFConfig, own: dict[str, Any]) -> tuple[Refinement, int]:
    """Return a config's refinement, and the index of the first row that gives a draft.

    The index counts the rows of a block, and is always 1. `own` is the config's field
    `dflash_config`.

    Raises:
        CheckpointError: sizes are missing or inconsistent.
    """
    fields = HFConfig(own, f"{hf.origin}: dflash_config")
    hidden, group = hf.integer("hidden_size"), fields.integer("conv_group_size", 16)
    if hidden % group:
        raise CheckpointError(
            f"{fields.origin}: conv_group_size={group} must divide hidden_size={hidden}"
        )
    vocab_size = hf.get("vocab_size", None)
    if hf.get("draft_vocab_size", vocab_size) != vocab_size:
        raise CheckpointError(
            f"{hf.origin}: DFlash2 with a draft vocabulary is not supported; use a head whose "
            f"draft_vocab_size is vocab_size={vocab_size}"
        )
    has_cap = bool(own.get("final_logit_softcapping"))
    return DFlash2(
        num_taps=fields.integer("conv_kernel_size", 2),
        group_size=group,
        rank=fields.integer("selector_rank", 256),
        num_candidates=fields.integer("selector_top_k", 16),
        embedding_scale=fields.number("input_embedding_scale", 1.0),
        multiplier=fields.number("output_multiplier", 1.0),
        soft_cap=fields.number("final_logit_softcapping", 1.0) if has_cap else None,
    ), 1
