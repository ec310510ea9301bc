"""Steps of drafters that make all drafts in one pass, compiled for an H200: their traffic.

The target is Llama-3.1-8B with two layers, at batch size 64. The drafters are those of
benchmarks/configs, with one layer. The draft logits of all positions are one array; a slice of it
for one position would be a copy.
"""

import json
from pathlib import Path

import pytest

from specjax.inspect.report import StepRequest, compile_steps, part_of

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
BATCH, FEW, K, VOCAB = 64, 8, 3, 128_256
DIM, NUM_STATES = 4096, 5
WEIGHTS = 2 * DIM * (NUM_STATES * DIM + 2 * 8 * 128)  # of what observed rows read: bytes

pytestmark = pytest.mark.h200


# By drafter: its method, and how often logits f32[B, V] are read or written beside GEMMs, of all
# K drafts together. P-EAGLE's are drawn by one launch, like DFlash's, which reads what one GEMM
# wrote; DFlash2's one by one, from the candidates of all: read once, then -inf but for these.
CASES = {"P-EAGLE": ("p_eagle", K), "DFlash2": ("dflash", K * (1 + 1 + 1))}
WITHOUT_DRAFTS, PLAIN = "DFlash2, K = 0", "no drafter"


@pytest.fixture(scope="module")
def reports(kept, tmp_path_factory):
    """Reports by drafter, and the report of a plain step."""
    model = CONFIGS / "Llama-3.1-8B"
    few = {"model": model, "batch": FEW, "k": 0, "num_layers": 1}
    many = {"model": model, "batch": BATCH, "k": K, "num_layers": 2}
    requests = {PLAIN: StepRequest(**few)}
    for name, (method, _) in CASES.items():
        folder = tmp_path_factory.mktemp(name)
        source = CONFIGS / "drafters" / f"Llama-3.1-8B-{name}" / "config.json"
        fields = json.loads(source.read_text())
        (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 1}))
        drafter = {"method": method, "drafter": str(folder)}
        requests[name] = StepRequest(**many, **drafter)
        requests[WITHOUT_DRAFTS] = StepRequest(**few, **drafter)  # the last one's
    return dict(zip(requests, compile_steps([*requests.values()], kept=kept), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_command_buffer_in_place(reports, name):
    report = reports[name]
    assert report.is_one_command_buffer, report.top_level
    assert not report.unknown_loops and not report.uncaptured_conditionals
    assert report.is_state_in_place
    assert report.num_launches["settle"] <= 6


@pytest.mark.parametrize("name", CASES)
def test_draft_logits_are_not_copied(reports, name):
    logits, num_passes = 4 * BATCH * VOCAB, CASES[name][1]
    beside = [
        one
        for one in reports[name].taken
        if part_of(one) in ("draft", "other") and one.kind != "gemm"
        if str(VOCAB) in one.shape or one.pallas == "draw_tokens" or "TopK" in one.kind
    ]
    moved = sum(one.num_bytes for one in beside)
    assert 0.9 * logits * K < moved < 1.05 * logits * num_passes, beside


def test_observed_rows_read_the_columns_of_keys_and_values(reports):
    """Columns of the merged projection are read without a copy. Other weights are read whole."""
    num_bytes = reports["DFlash2"].num_bytes["observe"]
    assert WEIGHTS < num_bytes < WEIGHTS + 2 * DIM * DIM


def test_a_step_without_drafts_only_keeps_what_the_head_will_observe(reports):
    """The step writes its rows' features. Another program reads the weights for eight steps."""
    plain, report = reports[PLAIN], reports[WITHOUT_DRAFTS]
    assert report.is_one_command_buffer and report.is_state_in_place
    assert report.num_launches["draft"] == report.num_launches["observe"] == 0
    assert report.num_launches["step"] <= plain.num_launches["step"] + 4
    kept = 2 * FEW * DIM * (1 + NUM_STATES)
    assert kept < report.num_bytes["step"] - plain.num_bytes["step"] < 3 * kept
    later = report.observed_later
    assert later.num_steps == 8 and WEIGHTS < later.num_bytes < WEIGHTS + 4 * 8 * kept
    assert plain.observed_later is None
