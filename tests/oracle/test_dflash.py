"""DFlash heads compared with transformers, at every round and in generation.

conftest.py runs the engine. The oracle runs transformers' model over a whole context and one block,
so that inputs, positions and width of every block are compared. The attention mask is transformers'
own or, for other layouts, follows their published rules. The extensions DSpark and DFlash2 are
written here in torch, around transformers' model.
"""

import pytest
from support import dflash
from support.dflash import CAPACITY, IN_CONFIG, SWA, VOCAB, torch, transformers
from support.marks import marked

WINDOW = 5
RANK, NUM_TAPS, GROUP, NUM_CANDIDATES, SCALE = 6, 3, 8, 5, 1.5


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=3)


# --- what a row at a position sees at others ------------------------------------------------------


def everything(row, at, anchor):
    return (row >= 0) & (at >= 0)


def from_the_anchor(row, at, anchor):
    return (row >= 0) & (at >= anchor - WINDOW)


def causal_from_the_anchor(row, at, anchor):
    return (at <= row) & (at >= anchor - WINDOW)


def causal_window(row, at, anchor):
    return (at <= row) & (row - at < WINDOW)


def near(row, at, anchor):
    return (row - at).abs() < 2


# --- what other heads add: tensors, and what refines the logits of a draft ------------------------


def dspark(own, model, num_drafted, generator):
    first = torch.randn(VOCAB, RANK, generator=generator)
    second = torch.randn(num_drafted, RANK, generator=generator)
    own["markov_head.markov_w1.weight"] = first
    own["markov_head.markov_w2.weight"] = second
    own["confidence_head.proj.weight"] = torch.ones(1, model.config.hidden_size + RANK)
    own["confidence_head.proj.bias"] = torch.ones(1)
    return lambda logits, hidden, previous: logits + second @ first[previous]


def convolved(x, base, taps):
    """Mix the rows x [1, T, D] with earlier rows, by base [taps, D] and taps [1, T, taps, G]."""
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for i in range(min(t + 1, NUM_TAPS)):
            out[0, t] += (base[i] + taps[0, t, i].repeat_interleave(GROUP)) * x[0, t - i]
    return out


def convolve_around(before, after, base, projection):
    """Hook convolutions to the outputs of two modules."""
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


# --- drafts of the engine -------------------------------------------------------------------------

DSPARK = {"add": dspark, "markov_rank": RANK, "sees": {"full": everything}}
DFLASH2 = {
    "add": dflash2,
    "sees": {"full": everything},
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
# Of `write_head`, of the oracle, and K in turn.
CASES = {
    "windows-from-the-anchor-own-embedding-d2t-k-changes": (
        {
            "layout": "speculators",
            "has_own": True,
            "kinds": ("sliding", "full"),
            "sees": {"full": everything, "sliding": causal_from_the_anchor},
        },
        {},
        (3, 0, 1, 0, 0, 0, 0),
    ),
    "windows-from-the-anchor-non-causal": (
        {
            "layout": "speculators",
            "kinds": ("sliding",),
            "sliding_window_non_causal": True,
            "sees": {"sliding": from_the_anchor},
        },
        {},
        (3,),
    ),
    "causal-windows-of-some-layers": (
        {"kinds": ("sliding", "full"), "sees": {"full": everything, "sliding": causal_window}},
        {},
        (3,),
    ),
    # All layers slide, which their layer_types do not say.
    "non-causal-windows-of-all-layers": ({"dflash_config": SWA, "sees": {"full": near}}, {}, (3,)),
    "dspark": (
        {**DSPARK, "architectures": ["Qwen3DSparkModel"], "block_size": 3},
        {"first_row": 0},
        (3, 1),
    ),
    "dspark-of-speculators-rows-as-dflash": (
        {**DSPARK, "speculators_model_type": "dspark", "layout": "speculators", "has_own": True},
        {},
        (3,),
    ),
    "dflash2": (DFLASH2, {"scale": SCALE}, (2,)),
}
SLOW = (
    "windows-from-the-anchor-own-embedding-d2t-k-changes",
    "dspark-of-speculators-rows-as-dflash",
    "dflash2",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", marked(CASES, fast=["windows-from-the-anchor-non-causal"], slow=SLOW)
)
def test_dflash_drafts(target, check_drafts, tmp_path, name):
    options, of_oracle, ks = CASES[name]
    files = dflash.write_head(tmp_path / "head", target.hf.config.hidden_size, **options)
    oracle = dflash.oracle_of(target, files, **of_oracle)
    check_drafts(target, files.folder, "dflash", oracle, ks=ks, least=20)


def candidates(target, assistant, prompt, num_tokens, monkeypatch):
    """Return transformers' drafts, by the number of tokens before the last one."""
    generator = transformers.generation.candidate_generator.DFlashTokenCandidateGenerator
    found, get = {}, generator.get_candidates

    def recording(self, input_ids, **others):
        ids, logits = get(self, input_ids, **others)
        length = input_ids.shape[1]
        if ids.shape[1] > length:
            found[length - 1] = ids[0, length:].tolist()
        return ids, logits

    with monkeypatch.context() as patch:
        patch.setattr(generator, "get_candidates", recording)
        target.hf.generate(
            torch.tensor([prompt]),
            assistant_model=assistant,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=num_tokens,
        )
    return found


THREE_LAYERS = {"aux": (1, 0, 1), "kinds": ("full", "sliding", "full"), "window": 3}


@pytest.mark.parametrize(
    "options, k",
    [
        pytest.param({"kinds": ("full", "sliding")}, 3, marks=pytest.mark.slow),
        pytest.param(THREE_LAYERS | {"block_size": 6}, 5, marks=pytest.mark.nightly),
    ],
    ids=["two-layers", "three-layers-a-window-shorter-than-the-block"],
)
def test_drafts_are_those_of_transformers_generation(
    target, check_drafts, ragged_prompts, tmp_path, monkeypatch, options, k
):
    dim, prompts = target.hf.config.hidden_size, []
    files = dflash.write_head(tmp_path / "head", dim, layout="transformers", **options)

    def make_prompts(*lengths, **others):
        prompts[:] = ragged_prompts(*lengths, **others)
        return prompts

    oracle, given = dflash.oracle_of(target, files), {"make_prompts": make_prompts, "least": 20}
    *_, drafted = check_drafts(target, files.folder, "dflash", oracle, ks=(k,), **given)
    num_rounds = 0
    # Every second request is greedy.
    for prompt, of_request in list(zip(prompts, drafted, strict=True))[::2]:
        lengths = [n for n, drafts in enumerate(of_request) if drafts[0] >= 0]
        # It does not draft when one token is left: so it is asked for more.
        num_tokens = lengths[-1] + 3 - len(prompt)
        expected = candidates(target, files.model, prompt, num_tokens, monkeypatch)
        assert list(expected)[: len(lengths)] == lengths
        whole = [n for n in lengths if n + k < CAPACITY]
        assert [of_request[n] for n in whole] == [expected[n] for n in whole]
        num_rounds += len(whole)
    assert num_rounds > 40
