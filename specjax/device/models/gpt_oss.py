"""The gpt-oss family (`gpt_oss`): a Llama with attention sinks, alternating windows and experts.

Every projection has a bias, including the projections of experts and router. Checkpoints store the
experts' weights in bfloat16 or in MXFP4, which stays packed in the device's memory.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from pallas_kernels.route import Rule
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.mxfp4 import BLOCK, mxfp4_experts
from specjax.checkpoint.spec import TensorSpec, cut_rows, stored
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.mlp import ClampedSwiGLU
from specjax.device.models.layers.moe import Experts, MoE
from specjax.device.models.llama import Llama
from specjax.device.models.windows import read_windows
from specjax.device.weights.experts import ExpertMatrices, fused_expert_matrices
from specjax.device.weights.matrix import Matrix, dense

_ROPE = {  # default of `rope_parameters`
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class RouterWeights(NamedTuple):
    """Weights of a `BiasedRouter`."""

    weight: Matrix  # [D, E]
    bias: jax.Array  # [E]


@dataclass(frozen=True)
class BiasedRouter:
    """A router whose logits have a bias. Its rule chooses the experts with the largest logits.

    The weights of the chosen experts are the softmax of their logits.
    """

    def specs(self, prefix: str, dim: int, num_experts: int) -> Any:
        """See `Router.specs`."""
        return RouterWeights(
            dense([f"{prefix}.router.weight"], dim, [num_experts]),
            stored([f"{prefix}.router.bias"], (num_experts,)),
        )

    @property
    def rule(self) -> Rule:
        """See `Router.rule`."""
        return Rule()

    def logits(self, params: RouterWeights, x: jax.Array) -> tuple[jax.Array, None]:
        """See `Router.logits`."""
        return params.weight.multiply(x) + params.bias[None], None


@dataclass(frozen=True, kw_only=True)
class GptOss(Llama):
    """A Llama whose experts have biases and other tensor names than usual."""

    @property
    def inner_multiple(self) -> int:
        """A number that must divide each device's part of the experts' inner width.

        The number is `BLOCK`: in MXFP4, `BLOCK` adjacent weights share a scale, so they must be on
        the same device. The number is 1 if `BLOCK` does not divide the inner width, because MXFP4
        cannot store such experts.
        """
        return BLOCK if self.experts and self.experts.intermediate_size % BLOCK == 0 else 1

    def mixture_specs(self, prefix: str, names: Collection[str]) -> MoE:
        """Return a layer's experts and router as `TensorSpec`s; see `Decoder.mixture_specs`.

        If `names` has packed MXFP4 tensors, the `TensorSpec`s of experts are `MXFP4Spec`s.
        """
        assert self.experts is not None, "the model has no experts"
        dim, num, inner = self.hidden_size, self.experts.num_held, self.experts.intermediate_size
        gate_up, down = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"

        def weights(name: str, num_in: int, num_out: int, **axis: str) -> Any:
            if f"{name}_blocks" in names:
                return ExpertMatrices(mxfp4_experts(name, num, num_in, num_out, **axis))
            return fused_expert_matrices(name, num, num_in, num_out, is_swapped=True, **axis)

        def bias(name: str, num_out: int, axis: str) -> Any:
            shape = num, num_out
            cuts = cut_rows([shape], axis, 1, groups="experts")
            return TensorSpec((f"{name}_bias",), (shape,), cuts=cuts)

        return MoE(
            router=self.experts.router.specs(prefix, dim, self.experts.num_experts),
            gate_up=weights(gate_up, dim, 2 * inner, columns="inner"),
            down=weights(down, inner, dim, rows="inner"),
            gate_up_bias=bias(gate_up, 2 * inner, "inner"),
            down_bias=bias(down, dim, "first"),
        )


def from_hf(hf: HFConfig) -> GptOss:
    """Return the model that a Hugging Face config of type `gpt_oss` describes."""
    hf.require("hidden_act", "silu")
    if not hf.get("rope_parameters", hf.get("rope_scaling", None)):
        hf = HFConfig({**hf.fields, "rope_parameters": _ROPE}, hf.origin)
    num_layers, num_heads = hf.integer("num_hidden_layers"), hf.integer("num_attention_heads")
    hidden, inner = hf.integer("hidden_size"), hf.integer("intermediate_size")
    head_dim, has_bias = hf.integer("head_dim", 64), hf.flag("attention_bias", True)
    if hf.get("quantization_config", None) and (hidden % BLOCK or inner % BLOCK):
        raise CheckpointError(
            f"{hf.origin}: hidden_size={hidden} and intermediate_size={inner} must be multiples of "
            f"{BLOCK} for weights in mxfp4"
        )
    experts = Experts(
        num_experts=hf.integer("num_local_experts", 128),
        num_chosen=hf.integer("num_experts_per_tok", 4),
        intermediate_size=inner,
        router=BiasedRouter(),
        activation=ClampedSwiGLU(
            limit=hf.number("swiglu_limit", 7.0), alpha=hf.number("swiglu_alpha", 1.702)
        ),
    )
    return GptOss(
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=hf.kv_heads(num_heads, default=8),
        head_dim=head_dim,
        rms_norm_eps=hf.number("rms_norm_eps", 1e-5),
        rope=hf.rope(head_dim),
        max_position=hf.max_position(131072),
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_sinks=True,
        windows=read_windows(hf, "gpt_oss", num_layers),
        experts=experts,
    )
