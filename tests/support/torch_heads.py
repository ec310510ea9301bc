"""Oracles of draft heads in torch, written from the published descriptions.

An oracle has two methods. `fuse` computes the hidden states that the head reads, from the target's
final hidden states and the inputs of its layers. `drafts` returns the first `num_drafts` of a
round's k drafts, after the last token x_n, where n is `length`.
"""

from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class Chain:
    """A head that drafts one token after another. `run` returns its output y for all rows.

    A subclass defines `embedding`, `run`, `recycled` (the hidden state for the next draft), and
    `logits` over the target's vocabulary.
    """

    keeps_last = True  # the drafter has the hidden state of the last row, as `fuse` gives it

    def fuse(self, final, entering):
        return final

    def recycled(self, y):
        return y

    def drafts(self, fused, tokens, length, k, num_drafts, choose):
        """Run the head on rows (f_p, x_{p+1}) for p < n, then on its own outputs and drafts."""
        committed, drafts, hidden = tokens[: length + 1], [], fused[:length]
        for _ in range(num_drafts):
            y = self.run(self.embedding[torch.tensor([*committed[1:], *drafts])], hidden)[-1]
            drafts.append(choose(self.logits(y), [*committed, *drafts]))
            hidden = torch.cat([hidden, self.recycled(y)[None]])
        return drafts


def rms_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotate(x, theta):
    """Rotate x [T, H, D]. Row t has position t."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


@dataclass(frozen=True)
class OracleHead(Chain):
    """An EAGLE head with the tensors and config of its checkpoint."""

    tensors: dict[str, torch.Tensor]
    decoder: dict[str, Any]
    embedding: torch.Tensor
    lm_head: torch.Tensor
    aux_layers: tuple[int, ...] = ()  # none: what the head reads is the target's output
    norm_before_residual: bool = False
    recycle_normed: bool = False

    @property
    def first(self):
        return "midlayer" if "midlayer.hidden_norm.weight" in self.tensors else "layers.0"

    @property
    def is_third(self):
        """Whether this is an EAGLE-3 head, whose layer has one more norm."""
        return f"{self.first}.hidden_norm.weight" in self.tensors

    def weight(self, name):
        return self.tensors[name + ".weight"]

    def norm(self, x, name):
        return rms_norm(x, self.weight(name), self.decoder["rms_norm_eps"])

    def project(self, x, name):
        return x @ self.weight(name).T + self.tensors.get(f"{name}.bias", torch.zeros(()))

    def attend(self, x, layer):
        dim, theta = self.decoder["head_dim"], self.decoder["rope_theta"]
        q, k, v = (
            self.project(x, f"{layer}.self_attn.{n}_proj").unflatten(-1, (-1, dim)) for n in "qkv"
        )
        group = q.shape[1] // k.shape[1]
        q, k = rotate(q, theta), rotate(k, theta)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        return self.project(mixed, f"{layer}.self_attn.o_proj")

    def mlp(self, x, layer):
        gate, up, down = (self.weight(f"{layer}.mlp.{n}_proj") for n in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def after_attention(self, a, layer):
        return a + self.mlp(self.norm(a, f"{layer}.post_attention_layernorm"), layer)

    def run(self, embedded, hidden):
        """Return y for all rows.

        The layer's input is x = fc [e; f] for EAGLE-1, and u = [norm(e); norm(g)] for EAGLE-3.
        """
        layer = self.first
        if not self.is_third:
            x = self.project(torch.cat([embedded, hidden], -1), "fc")
            return self.after_attention(x + self.attend(x, layer), layer)
        normed = self.norm(hidden, f"{layer}.hidden_norm")
        u = torch.cat([self.norm(embedded, f"{layer}.input_layernorm"), normed], -1)
        residual = normed if self.norm_before_residual else hidden
        return self.after_attention(residual + self.attend(u, layer), layer)

    def fuse(self, final, entering):
        return self.fused([entering[i] for i in self.aux_layers]) if self.aux_layers else final

    def fused(self, states):
        if "fc_norm.0.weight" in self.tensors:
            states = [self.norm(x, f"fc_norm.{i}") for i, x in enumerate(states)]
        states = torch.cat(states, -1)
        if "input_norm.weight" in self.tensors:
            states = self.norm(states, "input_norm")
        return self.project(states, "fc")

    def logits(self, y):
        """Return logits over the target's vocabulary; -inf outside the draft vocabulary."""
        if not self.is_third:
            return y @ self.lm_head.T
        small = self.norm(y, "norm") @ self.lm_head.T
        if "d2t" not in self.tensors:
            return small
        ids = torch.arange(len(small)) + self.tensors["d2t"]
        return torch.full((self.embedding.shape[0],), -torch.inf).index_copy(0, ids, small)

    def recycled(self, y):
        return self.norm(y, "norm") if self.recycle_normed else y


def oracle_of(target, files, *, aux_layers=(), kind=OracleHead, **options):
    embedding = target.hf.get_input_embeddings().weight
    own_head = files.tensors.get("lm_head.weight")
    return kind(
        files.tensors,
        files.config.get("transformer_layer_config", files.config),
        files.tensors.get("embed_tokens.weight", embedding).detach(),
        (target.hf.get_output_embeddings().weight if own_head is None else own_head).detach(),
        aux_layers,
        **options,
    )
