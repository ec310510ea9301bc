"""GLM-4.5, 4.6 and 4.7 (`glm4_moe`): a Llama with DeepSeek-V3's experts and MTP modules.

The rotary embedding rotates half of each head. GLM-4.7-Flash is not of this type, because it has
latent attention (see `deepseek_v3`).
"""

from dataclasses import dataclass

from specjax.device.models.deepseek_v3 import module_prefixes, read_num_modules
from specjax.device.models.experts import read_first_dense, read_sigmoid_experts
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.llama import Llama


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(Llama):
    """A Llama with MTP modules after its layers."""

    num_mtp_layers: int = 0  # modules for multi-token prediction (MTP)

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """The name prefixes of the MTP modules, which are numbered after the layers."""
        return module_prefixes(self.num_layers, self.num_mtp_layers)


def from_hf(hf: HFConfig) -> Glm4Moe:
    """Return the model that a Hugging Face config of type `glm4_moe` describes."""
    hf.require("hidden_act", "silu")
    hidden, heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    head_dim, num_layers = hf.integer("head_dim", hidden // heads), hf.integer("num_hidden_layers")
    return Glm4Moe(
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=hf.kv_heads(heads, default=8),
        head_dim=head_dim,
        rms_norm_eps=hf.number("rms_norm_eps", 1e-5),
        rope=hf.rope(head_dim, partial_factor=0.5),
        max_position=hf.max_position(131072),
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        qkv_bias=hf.flag("attention_bias"),
        qk_norm=hf.flag("use_qk_norm"),
        experts=read_sigmoid_experts(hf),
        dense_layers=read_first_dense(hf, num_layers, default=1),
        num_mtp_layers=read_num_modules(hf),
    )
