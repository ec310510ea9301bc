"""DFlash heads against torch, by the published description and without a cache; conftest.py has how
it is run. Every block is compared: what it reads, where it stands, how wide it is.
"""

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch

from specjax import LLM
from specjax.checkpoint.errors import CheckpointError

torch = pytest.importorskip("torch")

VOCAB, MASK, EPS, THETA = 24, 21, 1e-6, 5e2
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "block_size": 4,
}


@dataclass(frozen=True)
class Files:
    folder: Any
    tensors: dict[str, torch.Tensor]
    ids: torch.Tensor  # of the draft vocabulary
    aux: tuple[int, ...]  # outputs of which layers it reads
    is_causal: bool


def write_head(folder, dim, *, aux=(0, 2), layout="authors", has_own=False, seed=0, **edits):
    """A head with random weights; `has_own`: an embedding and a draft vocabulary of its own."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def norm(width):
        return 1 + 0.3 * torch.randn(width, generator=generator)

    heads, kv, head_dim = 4, 2, 10
    tensors = {"fc.weight": random(dim, len(aux) * dim), "hidden_norm.weight": norm(dim)}
    tensors["norm.weight"] = norm(dim)
    for i in range(2):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        tensors |= {
            f"layers.{i}.input_layernorm.weight": norm(dim),
            f"layers.{i}.post_attention_layernorm.weight": norm(dim),
            f"{attention}.q_proj.weight": random(heads * head_dim, dim),
            f"{attention}.k_proj.weight": random(kv * head_dim, dim),
            f"{attention}.v_proj.weight": random(kv * head_dim, dim),
            f"{attention}.o_proj.weight": random(dim, heads * head_dim),
            f"{attention}.q_norm.weight": norm(head_dim),
            f"{attention}.k_norm.weight": norm(head_dim),
            f"{mlp}.gate_proj.weight": random(40, dim),
            f"{mlp}.up_proj.weight": random(40, dim),
            f"{mlp}.down_proj.weight": random(dim, 40),
        }
    ids, config = torch.arange(VOCAB), CONFIG | {"hidden_size": dim}
    if has_own:
        ids = torch.randperm(VOCAB, generator=generator)[:15].sort().values
        tensors["embed_tokens.weight"] = 3 * random(VOCAB, dim)
        tensors["lm_head.weight"] = 3 * random(len(ids), dim)
        tensors["d2t"] = ids - torch.arange(len(ids))
        config["draft_vocab_size"] = len(ids)
    stored = tensors
    if layout == "authors":
        config["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": list(aux)}
    elif layout == "transformers":
        config |= {"mask_token_id": MASK, "target_layer_ids": list(aux)}
        renamed = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
        names = {name: renamed.get(name.removesuffix(".weight")) for name in tensors}
        stored = {f"{new}.weight" if new else old: tensors[old] for old, new in names.items()}
    else:
        config = {
            "speculators_model_type": "dflash",
            "transformer_layer_config": config,
            "aux_hidden_state_layer_ids": [i + 1 for i in aux],
            "mask_token_id": MASK,
            "block_size": 4,
        } | {key: value for key, value in config.items() if key == "draft_vocab_size"}
    folder.mkdir()
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | edits))
    return Files(folder, tensors, ids, aux, bool(edits.get("is_causal")))


def rms_norm(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def rotate(x, positions):
    """Rotary embedding of x [T, H, D] at these positions."""
    half = x.shape[-1] // 2
    frequencies = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


@dataclass(frozen=True)
class OracleBlock:
    """A DFlash head over a whole context and one block."""

    files: Files
    embedding: torch.Tensor
    lm_head: torch.Tensor

    def fuse(self, final, entering):
        states = torch.cat([entering[i + 1] for i in self.files.aux], -1)
        tensors = self.files.tensors
        return rms_norm(states @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])

    def drafts(self, fused, tokens, length, k, num_drafts, choose):
        block = torch.tensor([tokens[length], *[MASK] * k])
        x, context = self.embedding[block], fused[:length]
        for i in range(2):
            x = self.layer(i, x, context)
        logits = rms_norm(x, self.files.tensors["norm.weight"]) @ self.lm_head.T
        found, committed = [], tokens[: length + 1]
        for row in logits[1 : num_drafts + 1]:
            full = torch.full((VOCAB,), -torch.inf).index_copy(0, self.files.ids, row)
            found.append(choose(full, [*committed, *found]))
        return found

    def layer(self, i, x, context):
        def weight(name):
            return self.files.tensors[f"layers.{i}.{name}.weight"]

        def project(rows, name):
            return (rows @ weight(f"self_attn.{name}_proj").T).unflatten(-1, (-1, 10))

        n, size = len(context), len(x)
        normed = rms_norm(x, weight("input_layernorm"))
        both = torch.cat([context, normed])
        q, k = project(normed, "q"), project(both, "k")
        q = rotate(rms_norm(q, weight("self_attn.q_norm")), n + torch.arange(size))
        k = rotate(rms_norm(k, weight("self_attn.k_norm")), torch.arange(n + size))
        k, v = (z.repeat_interleave(2, 1) for z in (k, project(both, "v")))
        scores = torch.einsum("thd,shd->hts", q, k) / 10**0.5
        if self.files.is_causal:
            later = torch.ones(size, n + size).triu(n + 1).bool()
            scores = scores.masked_fill(later, -torch.inf)
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        x = x + mixed @ weight("self_attn.o_proj").T
        normed = rms_norm(x, weight("post_attention_layernorm"))
        gate = torch.nn.functional.silu(normed @ weight("mlp.gate_proj").T)
        return x + (gate * (normed @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=3)


@pytest.mark.parametrize(
    "options, ks",
    [
        ({}, (3, 0, 1)),
        ({"layout": "speculators", "has_own": True}, (3,)),
        pytest.param({"layout": "transformers", "is_causal": True}, (2,), marks=pytest.mark.slow),
    ],
    ids=["k-changes", "own-embedding-d2t-speculators", "causal-transformers"],
)
def test_dflash_drafts(target, check_drafts, tmp_path, options, ks):
    files = write_head(tmp_path / "head", target.hf.config.hidden_size, **options)
    own = files.tensors
    embedding = own.get("embed_tokens.weight", target.hf.get_input_embeddings().weight)
    lm_head = own.get("lm_head.weight", target.hf.get_output_embeddings().weight)
    oracle = OracleBlock(files, embedding, lm_head)
    check_drafts(target, SimpleNamespace(folder=files.folder), "dflash", oracle, ks=ks, least=20)


REFUSED = {
    "block": ({"block_size": 3}, "block_size=3 is a token and 2 drafts; lower .*tokens=3"),
    "mask": ({"dflash_config": {"mask_token_id": VOCAB}}, "mask_token_id=24 must be one of .* 24"),
    "layers": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [3]}}, "reads layers"),
    "window": ({"layer_types": ["sliding_attention"] * 2}, "sliding window"),
    "vocabulary": ({"vocab_size": 30}, "vocab_size=30, the target's is 24"),
}


@pytest.mark.parametrize("edits, message", REFUSED.values(), ids=REFUSED)
def test_heads_that_do_not_fit_are_refused(target, tmp_path, edits, message):
    files = write_head(tmp_path / "head", target.hf.config.hidden_size, **edits)
    speculation = {"method": "dflash", "model": str(files.folder), "num_speculative_tokens": 3}
    with pytest.raises(CheckpointError, match=message):
        LLM(target.folder, speculative_config=speculation, verbose=False)
