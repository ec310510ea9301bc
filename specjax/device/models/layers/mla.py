"""Multi-head latent attention, with low-rank projections (DeepSeek-V2)."""

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.rms_norm import rms_norm
from specjax.checkpoint.spec import stored
from specjax.device.cache.latent import NORM_EPS, LatentAttention, ProjectedLatents
from specjax.device.models.layers.rope import Angles
from specjax.device.models.layers.rows import Rows
from specjax.device.weights.latent_up import LatentProjection, latent_up
from specjax.device.weights.matrix import Matrix, dense


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLA:
    """Weights of a latent attention layer.

    Q is the rank of the queries, or their width if they are not low-rank.
    """

    down: Matrix  # [D, Q + R + D_r], queries and latents
    q_norm: jax.Array | None  # [Q]; like `q_up`, None if queries are not low-rank
    q_up: Matrix | None  # [Q, H (D_n + D_r)]
    latent_norm: jax.Array  # [R]
    up: LatentProjection  # projects latents [R] to keys [H, D_n] and values [H, D_v]
    out: Matrix  # [H D_v, D]

    def mix(
        self,
        x: jax.Array,
        rows: Rows,
        angles: Angles,
        cache: Any,
        layer: jax.Array,
        kind: LatentAttention,
    ) -> tuple[jax.Array, Any]:
        """Run the layer on rows x [N, D]; return its output [N, D] and the new cache."""
        down = self.down.split(self.down.multiply(x))
        q, latent = down["q"], down["latent"]
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up.multiply(rms_norm(q, self.q_norm, NORM_EPS))
        inputs = ProjectedLatents(q, latent, self.latent_norm, self.up, angles.rotation)
        mixed, cache = rows.mix(kind, cache, layer, inputs)
        return self.out.multiply(mixed.reshape(len(mixed), -1)), cache


def mla_specs(kind: LatentAttention, prefix: str, dim: int, q_rank: int | None) -> MLA:
    """Return the weights as `TensorSpec`s with Hugging Face's names.

    `dim` is the hidden size. `q_rank` is Q, or None if queries are not low-rank.
    """
    heads = kind.num_heads
    q_width, out_width = heads * (kind.nope_dim + kind.rope_dim), heads * kind.value_dim
    inputs = ["q_a_proj" if q_rank else "q_proj", "kv_a_proj_with_mqa"]
    return MLA(
        down=dense(
            [f"{prefix}.{name}.weight" for name in inputs],
            dim,
            [q_rank or q_width, kind.rank + kind.rope_dim],
            parts=("q", "latent"),
            columns=(
                (None if q_rank else "heads", q_rank or q_width),
                (None, kind.rank + kind.rope_dim),
            ),
        ),
        q_norm=stored([f"{prefix}.q_a_layernorm.weight"], (q_rank,)) if q_rank else None,
        q_up=dense([f"{prefix}.q_b_proj.weight"], q_rank, [q_width], columns="heads")
        if q_rank
        else None,
        latent_norm=stored([f"{prefix}.kv_a_layernorm.weight"], (kind.rank,)),
        up=latent_up(f"{prefix}.kv_b_proj.weight", heads, kind.nope_dim, kind.value_dim, kind.rank),
        out=dense([f"{prefix}.o_proj.weight"], out_width, [dim], rows="heads"),
    )
