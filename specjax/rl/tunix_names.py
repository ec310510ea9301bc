"""Rules by which `hf_named` renames the parameters of Tunix's models.

Tunix stores the weights of attention projections as [D, heads, size] (to heads) or [heads, size, D]
(from heads), where D is the hidden size. It stores other kernels as [in, out].
"""

from typing import Any

from specjax.rl.nnx import ArrayRule, Names, from_heads, to_heads, transposed

LAYER = "model.layers.*"
LLAMA3: Names = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "layers.*.input_layernorm.w": f"{LAYER}.input_layernorm.weight",
    "layers.*.attn.q_proj.w": ArrayRule(f"{LAYER}.self_attn.q_proj.weight", from_heads),
    "layers.*.attn.k_proj.w": ArrayRule(f"{LAYER}.self_attn.k_proj.weight", from_heads),
    "layers.*.attn.v_proj.w": ArrayRule(f"{LAYER}.self_attn.v_proj.weight", from_heads),
    "layers.*.attn.o_proj.w": ArrayRule(f"{LAYER}.self_attn.o_proj.weight", to_heads),
    "layers.*.post_attention_layernorm.w": f"{LAYER}.post_attention_layernorm.weight",
    "layers.*.mlp.gate_proj.kernel": ArrayRule(f"{LAYER}.mlp.gate_proj.weight", transposed),
    "layers.*.mlp.up_proj.kernel": ArrayRule(f"{LAYER}.mlp.up_proj.weight", transposed),
    "layers.*.mlp.down_proj.kernel": ArrayRule(f"{LAYER}.mlp.down_proj.weight", transposed),
    "final_norm.w": "model.norm.weight",
    "lm_head.w": ArrayRule("lm_head.weight", transposed, is_optional=True),
}
QWEN2: Names = {
    **LLAMA3,
    "layers.*.attn.q_bias": f"{LAYER}.self_attn.q_proj.bias",
    "layers.*.attn.k_bias": f"{LAYER}.self_attn.k_proj.bias",
    "layers.*.attn.v_bias": f"{LAYER}.self_attn.v_proj.bias",
}
QWEN3: Names = {
    **LLAMA3,
    "layers.*.attn.q_norm.w": f"{LAYER}.self_attn.q_norm.weight",
    "layers.*.attn.k_norm.w": f"{LAYER}.self_attn.k_norm.weight",
}
BY_CLASS = {"Llama3": LLAMA3, "Qwen2": QWEN2, "Qwen3": QWEN3}


def names_of(model: Any) -> Names | None:
    """Return the rules for a Tunix model, which are found by its class or by a base class.

    Return None for other models.
    """
    ours = (BY_CLASS[c.__name__] for c in type(model).__mro__ if c.__name__ in BY_CLASS)
    return next(ours, None)
