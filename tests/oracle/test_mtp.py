"""MTP modules against torch: each draft and hidden state, at every round of every request.

The oracle is written from the published description (conftest.py has how it is run), and checked
itself against the generic module of transformers, which no model there uses by default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from specjax import LLM
from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model

torch = pytest.importorskip("torch")

VOCAB = 24  # small, so that an untrained module is right now and then
K = 3
FLOAT32 = np.dtype(np.float32)

# The module of transformers takes after the target's last layer, which must be one of attention.
# The steps of the dense one take their K in turn from three: steps without drafts must still keep
# the module's cache true, in whatever slot it is.
CASES = {
    "qwen3_next": (
        "qwen3_next",
        {"norm_topk_prob": False, "head_dim": 24},
        {"layout": "single"},
        (2,),
    ),
    "qwen3_5-vision-tied-k-changes": (
        "qwen3_5",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 0.02},
        {},
        (3, 0, 2, 0, 0, 0, 0),
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"num_experts_per_tok": 3}, {}, (K,)),
    "qwen3_5": ("qwen3_5_text", {"num_hidden_layers": 4, "full_attention_interval": 4}, {}, (K,)),
}


# --- the oracle -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OracleModule:
    """An MTP module in torch, from the tensors of its checkpoint and the target's config."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    embedding: torch.Tensor
    lm_head: torch.Tensor

    def linear(self, x, name):
        return x @ self.tensors[f"mtp.{name}.weight"].T

    def norm(self, x, name):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return normed * (1 + self.tensors[f"mtp.{name}.weight"])

    def rotate(self, x):
        """The first dimensions of x [T, H, D], row t at position t."""
        rope = self.config["rope_parameters"]
        half = int(x.shape[-1] * rope["partial_rotary_factor"]) // 2
        turns = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * turns
        cos, sin = angles.cos().float(), angles.sin().float()
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)

    def attend(self, x):
        at, dim = "layers.0.self_attn", self.config["head_dim"]
        q, k, v = (self.linear(x, f"{at}.{n}_proj").unflatten(-1, (-1, dim)) for n in "qkv")
        q, gate = q[:, 0::2], q[:, 1::2]  # the heads' queries and gates take turns
        q = self.rotate(self.norm(q, f"{at}.q_norm"))
        k = self.rotate(self.norm(k, f"{at}.k_norm"))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
        return self.linear((mixed * gate.sigmoid()).flatten(1), f"{at}.o_proj")

    def swiglu(self, x, name):
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(torch.nn.functional.silu(gate) * up, f"{name}.down_proj")

    def mlp(self, x):
        at = "layers.0.mlp"
        if f"mtp.{at}.gate.weight" not in self.tensors:
            return self.swiglu(x, at)
        weights = self.linear(x, f"{at}.gate").softmax(-1)
        weights, chosen = weights.topk(self.config["num_experts_per_tok"])
        if self.config.get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        gate_up = self.tensors[f"mtp.{at}.experts.gate_up_proj"]
        down = self.tensors[f"mtp.{at}.experts.down_proj"]
        gate, up = torch.einsum("efd,td->tef", gate_up, x).chunk(2, -1)
        found = torch.einsum("edf,tef->ted", down, torch.nn.functional.silu(gate) * up)
        chosen = found.take_along_dim(chosen[..., None], 1)
        shared = self.linear(x, f"{at}.shared_expert_gate").sigmoid()
        return (weights[..., None] * chosen).sum(1) + shared * self.swiglu(x, f"{at}.shared_expert")

    def fuse(self, final, entering):
        return final

    def run(self, embedded, hidden):
        normed = (
            self.norm(embedded, "pre_fc_norm_embedding"),
            self.norm(hidden, "pre_fc_norm_hidden"),
        )
        x = self.linear(torch.cat(normed, -1), "fc")
        x = x + self.attend(self.norm(x, "layers.0.input_layernorm"))
        return x + self.mlp(self.norm(x, "layers.0.post_attention_layernorm"))

    def recycled(self, y):
        return self.norm(y, "norm")

    def logits(self, y):
        return self.norm(y, "norm") @ self.lm_head.T


def oracle_of(target, files):
    return OracleModule(
        files.tensors,
        files.config,
        target.hf.get_input_embeddings().weight.detach(),
        target.hf.get_output_embeddings().weight.detach(),
    )


def transformers_chain(folder, kind, tokens, num_drafts):
    """The module's hidden states over a prompt and its greedy drafts, as transformers has them."""
    import transformers
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    has_vision = kind == "qwen3_5"
    auto = "AutoModelForImageTextToText" if has_vision else "AutoModelForCausalLM"
    hf = getattr(transformers, auto).from_pretrained(folder, attn_implementation="eager").eval()
    config = hf.config.get_text_config()
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    module = MtpModel.from_pretrained(hf).eval()
    hidden = hf.get_decoder()(input_ids=torch.tensor([tokens[:-1]])).last_hidden_state
    cache, drafts = MtpCache(config=hf.config.get_mtp_config()), []
    following, positions = torch.tensor([tokens[1:]]), torch.arange(len(tokens) - 1)[None]
    outputs = []
    for _ in range(num_drafts):
        hidden = module.forward_layer(0, hidden, positions, cache, input_ids=following)
        outputs.append(hidden[0])
        hidden = hidden[:, -1:]
        following = hf.get_output_embeddings()(hidden).argmax(-1)
        drafts.append(int(following))
        positions = positions[:, -1:] + 1
    return torch.cat(outputs), drafts


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_next",
        pytest.param("qwen3_5-vision-tied-k-changes", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
        pytest.param("qwen3_5", marks=pytest.mark.slow),
    ],
)
def case(request, checkpoints):
    """(kind, target with the module's files, the module's files, the K of steps in turn)."""
    kind, config, options, ks = CASES[request.param]
    target = checkpoints.target(kind, vocab_size=VOCAB, **({"num_hidden_layers": 2} | config))
    files = checkpoints.mtp(target, **options)
    return kind, replace(target, folder=files.folder), files, ks


def test_the_oracle_is_what_transformers_computes(case):
    kind, target, files, _ = case
    oracle, tokens = oracle_of(target, files), [1, 17, 9, 20, 3, 11, 4, 7]
    with torch.no_grad():
        hidden, drafts = transformers_chain(files.folder, kind, tokens, K)
        states = target.hf.get_decoder()(input_ids=torch.tensor([tokens[:-1]])).last_hidden_state[0]
        embedded = oracle.embedding[torch.tensor(tokens[1:])]
        for i in range(K):
            y = oracle.run(embedded, states)
            expected = oracle.recycled(y)
            length = len(expected)
            np.testing.assert_allclose(expected[length - 1], hidden[length - 1], rtol=0, atol=1e-5)
            assert int(oracle.logits(y[-1]).argmax()) == drafts[i]
            embedded = torch.cat([embedded, oracle.embedding[drafts[i]][None]])
            states = torch.cat([states, expected[-1:]])


# --- drafts of the engine -------------------------------------------------------------------------


def test_drafts(case, check_drafts):
    _, target, files, ks = case
    drafter, _ = check_drafts(target, files, "mtp", oracle_of(target, files), ks=ks)
    assert not drafter.head.has_embedding and drafter.aux_layers == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, seed", [("qwen3_next", 2), ("qwen3_5_text", 0), ("qwen3_5_moe_text", 1)]
)
def test_more_drafts(checkpoints, check_drafts, kind, seed):
    target = checkpoints.target(
        kind,
        seed=seed,
        vocab_size=VOCAB,
        hidden_size=24 * (1 + seed),
        num_attention_heads=3,
        num_key_value_heads=(1, 3, 1)[seed],
        head_dim=(8, 16, 24)[seed],
        tie_word_embeddings=bool(seed % 2),
        linear_num_value_heads=2 * (1 + seed),
    )
    files = checkpoints.mtp(target, seed=seed + 1)
    target = replace(target, folder=files.folder)
    check_drafts(target, files, "mtp", oracle_of(target, files), ks=(3, 1, 2))


# --- files ----------------------------------------------------------------------------------------


def load(folder, **speculative):
    model, _ = load_model(folder, FLOAT32)
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=K, **speculative)
    return load_drafter(folder, config, model, FLOAT32)


def test_every_layout_gives_the_same_parameters(checkpoints):
    """In one file with the target or beside it, experts in one tensor or in many."""
    import jax

    target = checkpoints.target("qwen3_5_moe_text", vocab_size=VOCAB)
    first, *others = (
        load(checkpoints.mtp(of, layout=layout, is_beside=is_beside).folder)
        for of in (target, checkpoints.fused(target))
        for layout in ("fused", "single")
        for is_beside in (False, True)
    )
    assert len(others) == 7
    for drafter, params in others:
        assert drafter == first[0]
        jax.tree.map(np.testing.assert_array_equal, params, first[1])


def refused(folder, *words):
    speculation = {"method": "mtp", "num_speculative_tokens": K}
    with pytest.raises(CheckpointError) as error:
        LLM(folder, speculative_config=speculation, verbose=False)
    text = str(error.value)
    assert all(word in text for word in words), text


def test_a_checkpoint_without_the_module_is_refused(checkpoints):
    target = checkpoints.target("qwen3_5_text", vocab_size=VOCAB)
    refused(target.folder, str(target.folder), "mtp.fc.weight", "mtp.safetensors")


def test_a_model_without_modules_is_refused(checkpoints):
    target = checkpoints.target("llama", vocab_size=VOCAB)
    refused(target.folder, "'mtp'", "'llama'", "qwen3_5")


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5"])
def test_a_module_of_two_layers_is_refused(checkpoints, kind):
    files = checkpoints.mtp(checkpoints.target(kind, vocab_size=VOCAB))
    edits = {"mtp_num_hidden_layers": 2}
    if kind == "qwen3_5":
        edits = {"text_config": {**files.config, **edits}}
    refused(checkpoints.copy(files.folder, **edits), "mtp_num_hidden_layers=2")


@pytest.mark.parametrize(
    "name, fault",
    [
        ("mtp.norm.weight", "missing"),
        ("mtp.layers.0.self_attn.q_norm.weight", "missing"),
        ("mtp.layers.1.input_layernorm.weight", "unexpected"),
        ("mtp.fc.weight", "wrong shape"),
    ],
)
@pytest.mark.parametrize("is_beside", [False, True])
def test_tensors_of_the_module_are_all_accounted_for(
    checkpoints, rewrite_tensors, name, fault, is_beside
):
    files = checkpoints.mtp(
        checkpoints.target("qwen3_5_text", vocab_size=VOCAB), is_beside=is_beside
    )
    folder = checkpoints.copy(files.folder)

    def change(tensors):
        changed = {
            "missing": lambda: {n: x for n, x in tensors.items() if n != name},
            "unexpected": lambda: tensors | {name: torch.zeros(4)},
            "wrong shape": lambda: tensors | {name: tensors[name][:, :-1].clone()},
        }
        return changed[fault]()

    rewrite_tensors(folder / ("mtp.safetensors" if is_beside else "model.safetensors"), change)
    refused(folder, fault, name)


def test_mixed_layouts_of_experts_are_refused(checkpoints, rewrite_tensors):
    files = checkpoints.mtp(checkpoints.target("qwen3_5_moe_text", vocab_size=VOCAB))
    folder = checkpoints.copy(files.folder)
    single = "mtp.layers.0.mlp.experts.0.up_proj.weight"
    rewrite_tensors(folder / "model.safetensors", lambda old: old | {single: torch.zeros(24, 32)})
    refused(folder, single, "mtp.layers.0.mlp.experts.gate_up_proj")
