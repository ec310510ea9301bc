"""DFlash heads against transformers: its model at every round, and the drafts of its generation.

conftest.py has how the engine is run. The oracle runs transformers' model over a whole context and
one block, so that every block is compared: what it reads, where it stands, how wide it is. Which
rows see which is transformers' own mask, or in other layouts one by their published rules.
"""

from types import SimpleNamespace

import pytest
from support.dflash import CAPACITY, SWA, VOCAB, oracle_of, torch, transformers, write_head


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=3)


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
        (3, 0, 1, 0, 0, 0, 0),
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
            {"aux": (1, 0, 1), "kinds": ("full", "sliding", "full"), "window": 3, "block_size": 6},
            5,
            marks=SLOW,
        ),
    ],
    ids=["two-layers", "three-layers-a-window-shorter-than-the-block"],
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
