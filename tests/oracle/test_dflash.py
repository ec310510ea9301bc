"""DFlash heads against transformers: its model at every round, and the drafts of its generation.

conftest.py has how the engine is run. The oracle runs transformers' model over a whole context and
one block, so that every block is compared: what it reads, where it stands, how wide it is. Which
rows see which is transformers' own mask, or in other layouts one by their published rules.
"""

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.torch
from support.weights import randomise

from specjax import LLM
from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters.dflash import Span
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, MASK = 24, 21
CAPACITY = 64  # tokens of a request in the engine; rows past them are nowhere
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
    own: dict[str, torch.Tensor]  # what its model does not have
    ids: torch.Tensor  # of the draft vocabulary
    sees: Any  # (row, positions, anchor) to a mask, by kind of layer; None for transformers' own


def make_model(dim, aux, kinds, window, block_size, seed):
    """Transformers' model of random weights."""
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
    randomise(dict(model.named_parameters()), seed)
    return model


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
    has_own=False,
    seed=0,
    **edits,
):
    """A head with random weights; `has_own`: an embedding and a draft vocabulary of its own, and of
    masks an embedding in another file."""
    model = make_model(dim, aux, kinds, window, block_size, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    ids, own, config = torch.arange(VOCAB), {}, model.config.to_dict()
    if has_own:
        ids = torch.randperm(VOCAB, generator=generator)[:15].sort().values
        own["embed_tokens.weight"] = torch.randn(VOCAB, dim, generator=generator)
        own["lm_head.weight"] = torch.randn(len(ids), dim, generator=generator)
        own["d2t"] = ids - torch.arange(len(ids))
    tensors = {ENCODER.get(name, name): x for name, x in model.state_dict().items()}
    fields = {"block_size": block_size, "mask_token_id": MASK, "draft_vocab_size": len(ids)}
    if layout == "transformers":
        tensors = model.state_dict()
    else:
        kept = *SIZES, "hidden_size", "num_hidden_layers", "layer_types", "sliding_window"
        shape = {name: config.pop(name) for name in kept}
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
    return Files(folder, model, own, ids, sees)


@dataclass(frozen=True)
class OracleBlock:
    """A DFlash head over a whole context and one block."""

    files: Files
    embedding: torch.Tensor
    lm_head: torch.Tensor

    def fuse(self, final, entering):
        return torch.cat([entering[i + 1] for i in self.files.model.config.target_layer_ids], -1)

    def drafts(self, fused, tokens, length, k, num_drafts, choose):
        k = min(k, CAPACITY - 1 - length)
        block = self.embedding[[tokens[length], *[MASK] * k]]
        if (mask := self.files.own.get("mask")) is not None:
            block[1:] = mask
        cache = transformers.cache_utils.DFlashCache(config=self.files.model.config)
        cache.set_previous_accepted_tokens(length)
        hidden = self.files.model(
            noise_embeds=block[None],
            context_hidden_states=fused[None, :length],
            attention_mask=self.masks(length, k),
            cache=cache,
        )
        logits = hidden.last_hidden_state[0] @ self.lm_head.T
        found, committed = [], tokens[: length + 1]
        for row in logits[1 : num_drafts + 1]:
            full = torch.full((VOCAB,), -torch.inf).index_copy(0, self.files.ids, row)
            found.append(choose(full, [*committed, *found]))
        return found

    def masks(self, length, k):
        """What rows of the block see of context and block, by kind of layer."""
        if self.files.sees is None:
            return None
        at = torch.arange(length + k + 1)
        seen = {kind: rule(at[length:, None], at, length) for kind, rule in self.files.sees.items()}
        return {f"{kind}_attention": one[None, None] for kind, one in seen.items()}


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=3)


def oracle_of(target, files):
    embedding = target.hf.get_input_embeddings().weight
    lm_head = target.hf.get_output_embeddings().weight
    own = files.own
    return OracleBlock(
        files, own.get("embed_tokens.weight", embedding), own.get("lm_head.weight", lm_head)
    )


def everything(row, at, anchor):
    return (row >= 0) & (at >= 0)


WINDOW = 5
# What a row at a position sees at others, by layout and kind of layer.
RULES = {
    "speculators": {
        "full": everything,
        "sliding": lambda row, at, anchor: (at <= row) & (at >= anchor - WINDOW),
    },
    "speculators-non-causal": {
        "sliding": lambda row, at, anchor: (row >= 0) & (at >= anchor - WINDOW),
    },
    "authors": {
        "full": everything,
        "sliding": lambda row, at, anchor: (at <= row) & (row - at < WINDOW),
    },
    # All layers slide, which their layer_types do not say.
    "authors-non-causal": {"full": lambda row, at, anchor: (row - at).abs() < 2},
}
SLOW = pytest.mark.slow
CASES = [
    (
        "speculators",
        {"layout": "speculators", "has_own": True, "kinds": ("sliding", "full")},
        (3, 0, 1),
    ),
    pytest.param(
        "speculators-non-causal",
        {"layout": "speculators", "kinds": ("sliding",), "sliding_window_non_causal": True},
        (3,),
        marks=SLOW,
    ),
    pytest.param("authors", {"kinds": ("sliding", "full")}, (3, 2), marks=SLOW),
    pytest.param("authors-non-causal", {"dflash_config": SWA}, (3,), marks=SLOW),
]
IDS = [
    "windows-from-the-anchor-own-embedding-d2t-k-changes",
    "windows-from-the-anchor-non-causal",
    "causal-windows-of-some-layers",
    "non-causal-windows-of-all-layers",
]


@pytest.mark.parametrize("rules, options, ks", CASES, ids=IDS)
def test_dflash_drafts(target, check_drafts, tmp_path, rules, options, ks):
    sees = RULES[rules]
    files = write_head(tmp_path / "head", target.hf.config.hidden_size, sees=sees, **options)
    check_drafts(
        target,
        SimpleNamespace(folder=files.folder),
        "dflash",
        oracle_of(target, files),
        ks=ks,
        least=20,
    )


def candidates(target, assistant, prompt, num_tokens, monkeypatch):
    """The drafts of transformers' generation, by the number of tokens before the last one."""
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


@pytest.mark.parametrize(
    "options, k",
    [
        ({"kinds": ("full", "sliding")}, 3),
        pytest.param(
            {"aux": (1,), "kinds": ("sliding",), "window": 3, "block_size": 6}, 5, marks=SLOW
        ),
        pytest.param({"aux": (1, 0, 1), "kinds": ("full", "full", "full")}, 3, marks=SLOW),
    ],
    ids=["a-window", "one-window-shorter-than-the-block", "three-layers"],
)
def test_drafts_are_those_of_transformers_generation(
    target, check_drafts, ragged_prompts, tmp_path, monkeypatch, options, k
):
    dim = target.hf.config.hidden_size
    files = write_head(tmp_path / "head", dim, layout="transformers", **options)
    prompts = []

    def make_prompts(*lengths, **others):
        prompts[:] = ragged_prompts(*lengths, **others)
        return prompts

    _, engine = check_drafts(
        target,
        SimpleNamespace(folder=files.folder),
        "dflash",
        oracle_of(target, files),
        ks=(k,),
        make_prompts=make_prompts,
        least=20,
    )
    num_rounds = 0
    drafted, _ = engine.programs.state.drafter[1]
    # Every second request is greedy.
    for prompt, of_request in list(zip(prompts, drafted.tolist(), strict=True))[::2]:
        lengths = [n for n, drafts in enumerate(of_request) if drafts[0] >= 0]
        # It does not draft when one token is left: so it is asked for more.
        num_tokens = lengths[-1] + 3 - len(prompt)
        expected = candidates(target, files.model, prompt, num_tokens, monkeypatch)
        assert list(expected)[: len(lengths)] == lengths
        whole = [n for n in lengths if n + k < CAPACITY]
        assert [of_request[n] for n in whole] == [expected[n] for n in whole]
        num_rounds += len(whole)
    assert num_rounds > 40


MIXED = ["sliding_attention", "full_attention"]
SPANS = {
    "full": ({}, [Span(), Span()]),
    "causal": ({"is_causal": True}, [Span(ahead=0)] * 2),
    "causal-in-own-config": ({"dflash_config": {**IN_CONFIG, "causal": True}}, [Span(ahead=0)] * 2),
    "mixed": ({"layer_types": MIXED}, [Span(back=4, ahead=0), Span()]),
    "mixed-non-causal": (
        {"layer_types": MIXED, "is_causal": False},
        [Span(back=4, ahead=4), Span()],
    ),
    "swa": ({"dflash_config": SWA}, [Span(back=1, ahead=1)] * 2),
    "swa-causal": ({"dflash_config": {**SWA, "causal": True}}, [Span(back=1, ahead=0)] * 2),
    "swa-of-one-layer": (
        {"dflash_config": SWA, "layer_types": MIXED},
        [Span(back=1, ahead=0), Span()],
    ),
}


@pytest.mark.parametrize("edits, spans", SPANS.values(), ids=SPANS)
def test_what_rows_see_is_read_from_the_authors_configs(target, tmp_path, edits, spans):
    files = write_head(tmp_path / "head", target.hf.config.hidden_size, **edits)
    drafter, _ = load(target, files.folder)
    assert drafter.head.spans == tuple(spans)


def load(target, folder):
    config = SpeculativeConfig(method="dflash", model="", num_speculative_tokens=3)
    model, _ = load_model(target.folder, np.dtype("float32"))
    return load_drafter(folder, config, model, np.dtype("float32"))


@pytest.mark.parametrize("old, new", [("layers.0.", "midlayer."), ("", "model.")])
def test_names_of_other_exports(target, tmp_path, rewrite_tensors, old, new):
    files = write_head(tmp_path / "head", target.hf.config.hidden_size)
    expected = load(target, files.folder)

    def rename(tensors):
        names = {n: new + n.removeprefix(old) if n.startswith(old) else n for n in tensors}
        return {names[name]: x for name, x in tensors.items()}

    rewrite_tensors(files.folder / "model.safetensors", rename)
    drafter, params = load(target, files.folder)
    assert drafter == expected[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected[1])


REFUSED = {
    "block": ({"block_size": 3}, "block_size=3 is a token and 2 drafts; lower .*tokens=3"),
    "block-of-one": ({"block_size": 1}, "block_size=1 leaves no drafts"),
    "block-of-none": ({"block_size": 0}, "block_size must be a positive integer, got 0"),
    "no-mask": (
        {"dflash_config": {}, "mask_token_id": None},
        "mask_token_id=None must be one of the target's 24",
    ),
    "own-vocabulary": ({"draft_vocab_size": 15}, "draft_vocab_size=15 needs a lm_head of its own"),
    "another-width": ({"hidden_size": 30}, "head is 30 wide .* which is 32 wide"),
    "more-layers": ({"num_hidden_layers": 3, "layer_types": None}, "missing: layers.2."),
    "sinks": (
        {"dflash_config": {"attention_sink_bias": True}},
        "attention_sink_bias=True is not supported; use a head with False",
    ),
    "mask": ({"dflash_config": {"mask_token_id": VOCAB}}, "mask_token_id=24 must be one of .* 24"),
    "layers": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [2]}},
        r"outputs of layers \[2\]; the target has 0..2",
    ),
    "window": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
        "no sliding_window says how long",
    ),
    "windows": ({"layer_types": ["sliding_attention"]}, "layer_types must name .* each of .*=2"),
    "window-of-none": (
        {"dflash_config": SWA | {"swa_window_size": 0}},
        "a window of 0 tokens must be at least 1",
    ),
    "vocabulary": ({"vocab_size": 30}, "vocab_size=30, the target's is 24"),
}


def refused(target, folder, message):
    speculation = {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
    with pytest.raises(CheckpointError, match=message):
        LLM(target.folder, speculative_config=speculation, verbose=False)


@pytest.mark.parametrize("edits, message", REFUSED.values(), ids=REFUSED)
def test_heads_that_do_not_fit_are_refused(target, tmp_path, edits, message):
    files = write_head(tmp_path / "head", target.hf.config.hidden_size, **edits)
    refused(target, files.folder, message)


def test_tensors_that_do_not_fit_are_refused(target, tmp_path, rewrite_tensors):
    folder = write_head(tmp_path / "head", target.hf.config.hidden_size).folder
    torch.save({"mask_token_id": MASK}, folder / "mask_embedding.pt")
    refused(target, folder, "mask_embedding.pt must hold the tensor 'embedding'; it has .*")
    torch.save({"embedding": torch.ones(5)}, folder / "mask_embedding.pt")
    refused(target, folder, r"mask_embedding \(expected \[32\], found \[5\]\)")
    (folder / "mask_embedding.pt").unlink()
    file, hidden = folder / "model.safetensors", {"mask_hidden": torch.ones(1, 1, 64)}
    rewrite_tensors(file, lambda old: old | hidden)
    refused(target, folder, "it has a mask_hidden, as P-EAGLE heads do")
    rewrite_tensors(file, lambda old: {**old, "fc.weight": torch.ones(32, 32)})
    rewrite_tensors(file, lambda old: {n: x for n, x in old.items() if n != "mask_hidden"})
    refused(target, folder, r"fc.weight \(expected \[32, 64\], found \[32, 32\]\)")
