"""Random DFlash heads, and the drafts that transformers' model of such a head makes."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import safetensors.torch
from support.weights import randomise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, MASK = 24, 21
CAPACITY = 64  # maximum tokens of a request in the engine
SIZES = {
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}
IN_CONFIG = {"target_layer_ids": [0, 1], "mask_token_id": MASK}
SWA = {**IN_CONFIG, "use_swa": True, "swa_window_size": 2}
ENCODER = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}


@dataclass(frozen=True)
class Files:
    folder: Any
    model: Any  # of transformers
    own: dict[str, torch.Tensor]  # tensors that transformers' model does not have
    ids: torch.Tensor  # of the draft vocabulary
    refine: Any  # (logits, hidden, previous) -> refined logits; None: unrefined
    sees: Any  # (row, positions, anchor) -> mask, by kind of layer; None: transformers' masks


def write_head(
    folder,
    dim,
    *,
    aux=(0, 1),
    kinds=("full", "full"),
    window=5,
    block_size=4,
    layout="authors",
    sees=None,
    add=None,
    has_own=False,
    **edits,
):
    """Write a head with random weights.

    Args:
        has_own: whether the head has an embedding, an output head for a smaller vocabulary, and a
            mask embedding in another file.
        add: a function that adds tensors of an extension. It returns the function `Files.refine`.
        sees: see `Files`.
        edits: fields that replace fields of the config.
    """
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=dim,
        num_hidden_layers=len(kinds),
        layer_types=[f"{kind}_attention" for kind in kinds],
        sliding_window=window,
        target_layer_ids=list(aux),
        mask_token_id=MASK,
        block_size=block_size,
        rope_parameters={"rope_type": "default", "rope_theta": 5e2},
        **SIZES,
    )
    model = transformers.MuseGlimmerAssistantModel(config).eval().requires_grad_(False)
    randomise(dict(model.named_parameters()), seed=0)
    generator = torch.Generator().manual_seed(1)
    ids, own, config = torch.arange(VOCAB), {}, model.config.to_dict()
    if has_own:
        ids = torch.randperm(VOCAB, generator=generator)[:15].sort().values
        own["embed_tokens.weight"] = torch.randn(VOCAB, dim, generator=generator)
        own["lm_head.weight"] = torch.randn(len(ids), dim, generator=generator)
        own["d2t"] = ids - torch.arange(len(ids))
    refine = None if add is None else add(own, model, len(ids), generator)
    tensors = model.state_dict()
    if layout != "transformers":
        tensors = {ENCODER.get(name, name): x for name, x in tensors.items()}
        fields = {"block_size": block_size, "mask_token_id": MASK, "draft_vocab_size": len(ids)}
        kept = *SIZES, "hidden_size", "num_hidden_layers", "layer_types", "sliding_window"
        shape = {name: config[name] for name in kept}
        shape |= {"vocab_size": VOCAB, "rope_theta": 5e2, "model_type": "qwen3"}
        config = {**shape, **fields, "architectures": ["DFlashDraftModel"]}
        config["dflash_config"] = {"target_layer_ids": list(aux), "mask_token_id": MASK}
        if layout == "speculators":
            config = {"speculators_model_type": "dflash", "transformer_layer_config": shape}
            config |= {"aux_hidden_state_layer_ids": [i + 1 for i in aux], **fields}
    folder.mkdir()
    safetensors.torch.save_file(tensors | own, folder / "model.safetensors")
    if has_own:
        own["mask"] = torch.randn(dim, generator=generator)
        beside = {"embedding": own["mask"], "mask_token_id": MASK}
        torch.save(beside, folder / "mask_embedding.pt")
    (folder / "config.json").write_text(json.dumps(config | edits))
    return Files(folder, model, own, ids, refine, sees)


@dataclass(frozen=True)
class OracleBlock:
    """Runs a DFlash head in transformers over a whole context and one block."""

    files: Files
    embedding: torch.Tensor
    lm_head: torch.Tensor
    first_row: int = 1  # the first row of the block that gives a draft
    scale: float = 1.0  # of the block's embedding

    def fuse(self, final, entering):
        return torch.cat([entering[i + 1] for i in self.files.model.config.target_layer_ids], -1)

    def drafts(self, fused, tokens, length, k, num_drafts, choose):
        k = min(max(k - 1 + self.first_row, 0), CAPACITY - 1 - length)
        block = self.embedding[[tokens[length], *[MASK] * k]]
        if (mask := self.files.own.get("mask")) is not None:
            block[1:] = mask
        cache = transformers.cache_utils.DFlashCache(config=self.files.model.config)
        cache.set_previous_accepted_tokens(length)
        hidden = self.files.model(
            noise_embeds=self.scale * block[None],
            context_hidden_states=fused[None, :length],
            attention_mask=self.masks(length, k),
            cache=cache,
        )
        found, committed = [], tokens[: length + 1]
        for state in hidden.last_hidden_state[0, self.first_row :][:num_drafts]:
            row = self.lm_head @ state
            if self.files.refine is not None:
                row = self.files.refine(row, state, [*committed, *found][-1])
            full = torch.full((VOCAB,), -torch.inf).index_copy(0, self.files.ids, row)
            found.append(choose(full, [*committed, *found]))
        return found

    def masks(self, length, k):
        """Return the attention mask of the block's rows over context and block, by kind of layer.

        None means transformers' own masks.
        """
        if self.files.sees is None:
            return None
        at = torch.arange(length + k + 1)
        seen = {kind: rule(at[length:, None], at, length) for kind, rule in self.files.sees.items()}
        return {f"{kind}_attention": one[None, None] for kind, one in seen.items()}


def oracle_of(target, files, **options):
    """Return the oracle of a head. Weights that the head does not have are the target's."""
    shared = target.hf.get_input_embeddings().weight, target.hf.get_output_embeddings().weight
    names = "embed_tokens.weight", "lm_head.weight"
    both = [files.own.get(name, own) for name, own in zip(names, shared, strict=True)]
    return OracleBlock(files, *both, **options)
