"""Medusa heads compared with torch, by the published description; conftest.py runs the engine."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import safetensors.torch

from specjax import LLM
from specjax.checkpoint.errors import CheckpointError

torch = pytest.importorskip("torch")

VOCAB, NUM_HEADS = 24, 3
# The authors' layout, and vLLM's with all that it may have.
FIRST, VLLM = "authors", "vllm"


def write_heads(folder, layout, dim, **edits):
    """Write a random checkpoint; return its folder, and the torch modules of each head."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator) / dim**0.5

    num_blocks, size = (2, VOCAB) if layout == FIRST else (1, 15)
    heads = [
        ([(random(dim, dim), random(dim)) for _ in range(num_blocks)], 4 * random(size, dim))
        for _ in range(NUM_HEADS)
    ]
    tensors, ids = {}, torch.arange(size)
    for i, (blocks, head) in enumerate(heads):
        for j, (weight, bias) in enumerate(blocks):
            stem = f"{i}.{j}.linear" if layout == FIRST else f"blocks.{i}.layers.{j}"
            tensors |= {f"{stem}.weight": weight, f"{stem}.bias": bias}
        tensors[f"{i}.{num_blocks}.weight" if layout == FIRST else f"lm_heads.{i}.weight"] = head
    folder.mkdir()
    if layout == FIRST:
        config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": num_blocks}
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        ids = torch.randperm(VOCAB, generator=generator)[:size]
        config = {
            "model_type": "medusa",
            "num_heads": NUM_HEADS,
            "num_hidden_layers": num_blocks,
            "truncated_vocab_size": size,
            "medusa_fc_bias": True,
        }
        tensors["token_map"] = ids
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | edits))
    return folder, heads, ids


@dataclass(frozen=True)
class OracleHeads:
    """Head i makes draft i, from the target's last hidden state."""

    heads: Any
    ids: torch.Tensor
    keeps_last = True

    def fuse(self, final, entering):
        return final

    def drafts(self, fused, tokens, length, k, num_drafts, choose):
        found, committed = [], tokens[: length + 1]
        for blocks, head in self.heads[:num_drafts]:
            x = fused[length - 1]
            for weight, bias in blocks:
                x = x + torch.nn.functional.silu(weight @ x + bias)
            logits = torch.full((VOCAB,), -torch.inf).index_copy(0, self.ids, head @ x)
            found.append(choose(logits, [*committed, *found]))
        return found


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, ks", [pytest.param(FIRST, (2, 0), marks=pytest.mark.slow), (VLLM, (3,))]
)
def test_medusa_drafts(target, check_drafts, tmp_path, layout, ks):
    folder, *heads = write_heads(tmp_path / "heads", layout, target.hf.config.hidden_size)
    check_drafts(target, folder, "medusa", OracleHeads(*heads), ks=ks, least=20)


REFUSED = {
    "too-few": (4, 0, {}, "num_heads=3"),
    "too-wide": (NUM_HEADS, 2, {}, "wrong shape"),
    "of-fewer-tokens": (NUM_HEADS, 0, {"truncated_vocab_size": 9}, "have no token_map"),
}


@pytest.mark.parametrize("k, wider, edits, words", REFUSED.values(), ids=REFUSED)
def test_heads_that_do_not_fit_are_refused(target, tmp_path, k, wider, edits, words):
    dim = target.hf.config.hidden_size + wider
    folder, *_ = write_heads(tmp_path / "heads", FIRST, dim, **edits)
    speculation = {"method": "medusa", "model": str(folder), "num_speculative_tokens": k}
    with pytest.raises(CheckpointError, match=words):
        LLM(target.folder, speculative_config=speculation, verbose=False)
