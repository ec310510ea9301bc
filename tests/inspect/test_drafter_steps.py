"""Steps of drafters that make all drafts in one pass, compiled for an H200: what drawing moves.

Llama-3.1-8B with two layers, batch size 64; the drafters of benchmarks/configs with one layer. The
draft logits of all positions are one array, and a slice of it for one position would be a copy.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from specjax.inspect.report import StepRequest, compile_steps, part_of

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
BATCH, FEW, VOCAB = 64, 8, 128_256

pytestmark = pytest.mark.h200


@dataclass(frozen=True)
class Case:
    """A drafter, and what one draft's logits f32[B, V] may cost in kernels beside GEMMs."""

    name: str
    method: str
    k: int
    num_passes: int  # readings and writings of logits [B, V], of all K drafts together

    def __str__(self):
        return self.name


CASES = [
    # Drawn by one launch, like DFlash's; it reads what one GEMM wrote.
    Case("P-EAGLE", "p_eagle", 3, 3),
    # Drawn one by one, from the candidates of all: read once, then -inf but for these.
    Case("DFlash2", "dflash", 3, 3 * (1 + 1 + 1)),
]


WITHOUT_DRAFTS = Case("DFlash2", "dflash", 0, 0)
PLAIN = "no drafter"


@pytest.fixture(scope="module")
def reports(compile_for_h200, tmp_path_factory):
    """Reports by case, all in one process; for K = 0 without a drafter as well."""
    few = {"batch": FEW, "k": 0, "num_layers": 1}
    requests = [StepRequest(model=CONFIGS / "Llama-3.1-8B", **few)]
    for case in (WITHOUT_DRAFTS, *CASES):
        folder = tmp_path_factory.mktemp(case.name)
        source = CONFIGS / "drafters" / f"Llama-3.1-8B-{case.name}" / "config.json"
        fields = json.loads(source.read_text())
        (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 1}))
        requests.append(
            StepRequest(
                model=CONFIGS / "Llama-3.1-8B",
                method=case.method,
                drafter=str(folder),
                **({"batch": BATCH, "k": case.k, "num_layers": 2} if case.k else few),
            )
        )
    return dict(zip((PLAIN, WITHOUT_DRAFTS, *CASES), compile_steps(requests), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_one_command_buffer_in_place(reports, case):
    report = reports[case]
    assert report.is_one_command_buffer, report.top_level
    assert not report.unknown_loops and not report.uncaptured_conditionals
    assert report.is_state_in_place
    assert report.num_launches["settle"] <= 6


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draft_logits_are_not_copied(reports, case):
    logits = 4 * BATCH * VOCAB
    beside = [
        one
        for one in reports[case].taken
        if part_of(one) in ("draft", "other") and one.kind != "gemm"
        if str(VOCAB) in one.shape or one.pallas == "draw_tokens" or "TopK" in one.kind
    ]
    moved = sum(one.num_bytes for one in beside)
    assert 0.9 * logits * case.k < moved < 1.05 * logits * case.num_passes, beside


def test_observed_rows_read_the_columns_of_keys_and_values(reports):
    """Of the merged projection, without copying them; what combines the states reads all."""
    report = reports[CASES[1]]
    dim, width, num_states = 4096, 2 * 8 * 128, 5
    weights = 2 * dim * (num_states * dim + width)
    assert weights < report.num_bytes["observe"] < weights + 2 * dim * dim


def test_a_step_without_drafts_only_keeps_what_the_head_will_observe(reports):
    """It writes the features of its rows; another program reads the weights, for eight steps."""
    plain, report = reports[PLAIN], reports[WITHOUT_DRAFTS]
    dim, width, num_states = 4096, 2 * 8 * 128, 5
    assert report.is_one_command_buffer and report.is_state_in_place
    assert report.num_launches["draft"] == report.num_launches["observe"] == 0
    assert report.num_launches["step"] <= plain.num_launches["step"] + 4
    kept = 2 * FEW * dim * (1 + num_states)
    assert kept < report.num_bytes["step"] - plain.num_bytes["step"] < 3 * kept
    later, weights = report.observed_later, 2 * dim * (num_states * dim + width)
    assert later.num_steps == 8 and weights < later.num_bytes < weights + 4 * 8 * kept
    assert plain.observed_later is None
