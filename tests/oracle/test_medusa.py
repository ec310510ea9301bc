"""Medusa heads against torch, by the published description; conftest.py has how it is run."""

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch

from specjax import LLM
from specjax.checkpoint.errors import CheckpointError

torch = pytest.importorskip("torch")

VOCAB, NUM_HEADS = 24, 3
# The authors' layout, and vLLM's with all that it may have.
FIRST, VLLM = "authors", "vllm"


def write_heads(folder, layout, dim, *, seed=0, **edits):
    """A checkpoint with random weights; its folder and, by head, blocks and head in torch."""
    generator = torch.Generator().manual_seed(seed)

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
    """The heads as a chain: rows of NaN after the true ones say how many drafts there are."""

    heads: Any
    ids: torch.Tensor
    embedding: torch.Tensor

    def fuse(self, final, entering):
        return final

    def run(self, embedded, hidden):
        num_drafts = int(hidden.isnan().all(-1).sum())
        x = hidden[len(hidden) - 1 - num_drafts]
        blocks, head = self.heads[num_drafts]
        for weight, bias in blocks:
            x = x + torch.nn.functional.silu(weight @ x + bias)
        return torch.full((VOCAB,), -torch.inf).index_copy(0, self.ids, head @ x)[None]

    def recycled(self, y):
        return torch.full((self.embedding.shape[1],), torch.nan)

    def logits(self, y):
        return y


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=1)


@pytest.mark.parametrize("layout, ks", [(FIRST, (3, 0, 1)), (VLLM, (3,))])
def test_medusa_drafts(target, check_drafts, tmp_path, layout, ks):
    dim = target.hf.config.hidden_size
    folder, heads, ids = write_heads(tmp_path / "heads", layout, dim)
    oracle = OracleHeads(heads, ids, target.hf.get_input_embeddings().weight)
    check_drafts(target, SimpleNamespace(folder=folder), "medusa", oracle, ks=ks, least=20)


def refused(target, folder, *, k=NUM_HEADS):
    speculation = {"method": "medusa", "model": str(folder), "num_speculative_tokens": k}
    with pytest.raises(CheckpointError) as error:
        LLM(target.folder, speculative_config=speculation, verbose=False)
    return str(error.value)


def test_heads_that_do_not_fit_are_refused(target, tmp_path):
    dim = target.hf.config.hidden_size
    folder, *_ = write_heads(tmp_path / "few", FIRST, dim)
    assert "num_heads=3" in refused(target, folder, k=4)
    folder, *_ = write_heads(tmp_path / "wide", FIRST, dim + 2)
    assert "wrong shape" in refused(target, folder)
    folder, *_ = write_heads(tmp_path / "small", FIRST, dim, truncated_vocab_size=9)
    assert "have no token_map" in refused(target, folder)
