"""EAGLE heads with random weights, in the layouts in which heads are published."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.weights import HeadFiles, TargetFiles, randomise


def write_head(
    folder: Path, make: Any, target: TargetFiles, options: Mapping[str, Any]
) -> HeadFiles:
    """Write a head with random weights to `folder`.

    Args:
        make: the function that returns the tensors and the config, such as `eagle_tensors`.
        options: the options of `make`, and optionally the `seed` and the name of the weights'
            `file`.
    """
    import safetensors.torch
    import torch

    own = {"seed": 1, "file": "model.safetensors"}
    seed, file = (options.get(name, default) for name, default in own.items())
    tensors, config = make(target, **{n: x for n, x in options.items() if n not in own})
    floats = {name: x for name, x in tensors.items() if x.is_floating_point()}
    randomise({n: x for n, x in floats.items() if n != "embed_tokens.weight"}, seed)
    folder.mkdir()
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        safetensors.torch.save_file(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return HeadFiles(folder, tensors, config)


def eagle_tensors(
    target: TargetFiles,
    *,
    fc_bias: bool = False,
    lm_head: bool = False,
    embedding: str | None = None,
    **config: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the config of an EAGLE-1 head.

    `embedding` is None, "same" for a copy of the target's embedding, or "own" for another one.
    """
    import torch

    config = _decoder_config(target) | config
    dim = config["hidden_size"]
    tensors = {
        "fc.weight": torch.empty(dim, 2 * dim),
        **_decoder_layer(config, "layers.0", dim),
        **_embedding(target, embedding, dim),
    }
    if fc_bias:
        tensors["fc.bias"] = torch.empty(dim)
    if lm_head:
        tensors["lm_head.weight"] = torch.empty(config["vocab_size"], dim)
    return tensors, config


def eagle3_tensors(
    target: TargetFiles,
    *,
    layout: str = "raw",
    draft_vocab: int | None = None,
    num_aux: int = 3,
    input_norm: bool = False,
    fc_norm: bool = False,
    fc_bias: bool = False,
    lm_head: bool = True,
    embedding: str | None = None,
    **config: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the config of an EAGLE-3 head.

    The `layout` is "raw" (the authors', midlayer.*) or "speculators" (layers.0.*, nested config).
    """
    import torch

    decoder = _decoder_config(target)
    decoder |= {key: config.pop(key) for key in decoder.keys() & config.keys()}
    vocab, wide = decoder["vocab_size"], target.hf.config.hidden_size
    if target.hf.config.num_hidden_layers < 3:  # too few for the default ones
        config = {"eagle_aux_hidden_state_layer_ids": list(range(num_aux))} | config
    dim = decoder["hidden_size"]
    layer = "midlayer" if layout == "raw" else "layers.0"
    tensors = {
        **({"fc.weight": torch.empty(dim, num_aux * wide)} if num_aux else {}),
        **({"fc.bias": torch.empty(dim)} if fc_bias else {}),
        **({"lm_head.weight": torch.empty(draft_vocab or vocab, dim)} if lm_head else {}),
        **_decoder_layer(decoder, layer, 2 * dim),
        f"{layer}.input_layernorm.weight": torch.empty(dim),
        f"{layer}.hidden_norm.weight": torch.empty(dim),
        "norm.weight": torch.empty(dim),
        **_embedding(target, embedding, dim),
    }
    if input_norm:
        tensors["input_norm.weight"] = torch.empty(num_aux * wide)
    for i in range(num_aux if fc_norm else 0):
        tensors[f"fc_norm.{i}.weight"] = torch.empty(wide)
    if draft_vocab:
        kept = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))[:draft_vocab]
        kept = kept.sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
        config["draft_vocab_size"] = draft_vocab
    if layout == "raw":
        return tensors, decoder | config
    return tensors, {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": decoder,
        **config,
    }


def p_eagle_tensors(
    target: TargetFiles, *, bias: bool = False, num_layers: int = 3, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the config of a P-EAGLE head.

    It has the tensors of an EAGLE-3 head, more layers, and the weight `mask_hidden` in place of the
    target's hidden states. If `bias`, all projections of attention have a bias. `options` are
    options of `eagle3_tensors`.
    """
    import torch

    tensors, config = eagle3_tensors(target, num_hidden_layers=num_layers, **options)
    decoder = config.get("transformer_layer_config", config)
    dim, wide = decoder["hidden_size"], tensors["fc.weight"].shape[1]
    for i in range(1, num_layers):
        tensors |= _decoder_layer(decoder, f"layers.{i}", dim)
        tensors[f"layers.{i}.input_layernorm.weight"] = torch.empty(dim)
    if bias:
        tensors |= {
            name.removesuffix("weight") + "bias": torch.empty(len(x))
            for name, x in tensors.items()
            if ".self_attn." in name
        }
    tensors["mask_hidden"] = torch.empty(1, 1, wide)
    return tensors, config


def _decoder_config(target: TargetFiles) -> dict[str, Any]:
    hf = target.hf.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _decoder_layer(config: Mapping[str, Any], layer: str, num_in: int) -> dict[str, Any]:
    import torch

    dim, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (queries, num_in),
        "self_attn.k_proj": (keys, num_in),
        "self_attn.v_proj": (keys, num_in),
        "self_attn.o_proj": (dim, queries),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (inner, dim),
        "mlp.up_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
    }
    return {f"{layer}.{name}.weight": torch.empty(shape) for name, shape in shapes.items()}


def _embedding(target: TargetFiles, kind: str | None, dim: int) -> dict[str, Any]:
    import torch

    if kind is None:
        return {}
    if kind == "same":
        weight = target.hf.get_input_embeddings().weight.detach().clone()
    else:
        generator = torch.Generator().manual_seed(9)
        weight = torch.randn(target.hf.config.vocab_size, dim, generator=generator)
    return {"embed_tokens.weight": weight}
