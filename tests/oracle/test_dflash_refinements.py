"""What DSpark and DFlash2 add to DFlash, written in torch on transformers' model of the latter.

See test_dflash.py.
"""

from types import SimpleNamespace

import pytest
from support.dflash import IN_CONFIG, VOCAB, oracle_of, torch, write_head

RANK, NUM_TAPS, GROUP, NUM_CANDIDATES, SCALE = 6, 3, 8, 5, 1.5


def everything(row, at, anchor):
    return (row >= 0) & (at >= 0)


def dspark(own, model, num_drafted, generator):
    first = torch.randn(VOCAB, RANK, generator=generator)
    second = torch.randn(num_drafted, RANK, generator=generator)
    own["markov_head.markov_w1.weight"] = first
    own["markov_head.markov_w2.weight"] = second
    own["confidence_head.proj.weight"] = torch.ones(1, model.config.hidden_size + RANK)
    own["confidence_head.proj.bias"] = torch.ones(1)
    return lambda logits, hidden, previous: logits + second @ first[previous]


def convolved(x, base, taps):
    """Rows x [1, T, D], each mixed with those before it by base [taps, D] and [1, T, taps, G]."""
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for i in range(min(t + 1, NUM_TAPS)):
            out[0, t] += (base[i] + taps[0, t, i].repeat_interleave(GROUP)) * x[0, t - i]
    return out


def convolve_around(before, after, base, projection):
    """Hook the convolutions on the output of two modules."""
    kept = []

    def first(module, inputs, x):
        taps = (x @ projection.T).reshape(*x.shape[:2], 2, NUM_TAPS, -1)
        kept[:] = [taps[:, :, 1]]
        return convolved(x, base[0], taps[:, :, 0])

    def second(module, inputs, x):
        is_tuple = isinstance(x, tuple)
        out = convolved(x[0] if is_tuple else x, base[1], kept[0])
        return (out, *x[1:]) if is_tuple else out

    before.register_forward_hook(first)
    after.register_forward_hook(second)


def dflash2(own, model, num_drafted, generator):
    dim = model.config.hidden_size

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    for i, layer in enumerate(model.layers):
        parts = {
            "attention": (layer.input_layernorm, layer.self_attn),
            "mlp": (layer.post_attention_layernorm, layer.mlp),
        }
        for name, modules in parts.items():
            base = random(2, NUM_TAPS, dim)
            projection = random(2 * NUM_TAPS * dim // GROUP, dim) / dim**0.5
            own[f"layers.{i}.{name}_conv.base_kernel"] = base
            own[f"layers.{i}.{name}_conv.kernel_projection.weight"] = projection
            convolve_around(*modules, base, projection)
    first, second, down = random(VOCAB, RANK), random(VOCAB, RANK), random(RANK, dim) / dim**0.5
    own["candidate_selector.predecessor_codebook"] = first
    own["candidate_selector.successor_codebook"] = second
    own["candidate_selector.hidden_projection.weight"] = down

    def refine(logits, hidden, previous):
        best = logits.topk(NUM_CANDIDATES)
        unary = 3 * torch.tanh(0.5 * best.values / 3)
        pairs = second[best.indices] @ (first[previous] * (down @ hidden))
        return torch.full((VOCAB,), -torch.inf).index_copy(0, best.indices, unary + pairs)

    return refine


DSPARK = {"add": dspark, "markov_rank": RANK}
DFLASH2 = {
    "add": dflash2,
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        **IN_CONFIG,
        "conv_kernel_size": NUM_TAPS,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": NUM_CANDIDATES,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 3.0,
        "input_embedding_scale": SCALE,
    },
}
CASES = {
    "dspark": (
        {**DSPARK, "architectures": ["Qwen3DSparkModel"], "block_size": 3},
        {"first_row": 0},
        (3, 0, 1),
    ),
    "dspark-of-speculators-rows-as-dflash": (
        {**DSPARK, "speculators_model_type": "dspark", "layout": "speculators", "has_own": True},
        {},
        (3,),
    ),
    "dflash2": (DFLASH2, {"scale": SCALE}, (3, 2)),
}
SLOW = {"dspark-of-speculators-rows-as-dflash", "dflash2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_drafts(checkpoints, check_drafts, tmp_path, name):
    options, of_oracle, ks = CASES[name]
    target = checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=3)
    dim = target.hf.config.hidden_size
    files = write_head(tmp_path / "head", dim, sees={"full": everything}, **options)
    check_drafts(
        target,
        SimpleNamespace(folder=files.folder),
        "dflash",
        oracle_of(target, files, **of_oracle),
        ks=ks,
        least=20,
    )
