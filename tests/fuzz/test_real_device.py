"""Random schedules on real engines with tiny models: the tokens are those of each request alone."""

from collections.abc import Iterator

import pytest
from support.real_schedules import Found, run_real_schedule

from specjax import LLM

SCHEDULES = 15  # of each engine
K = 3
SIZES = {
    "max_model_len": 64,
    "page_size": 8,
    "max_num_batched_tokens": 32,
    "show_progress": False,
    "max_logprobs": 0,
}


@pytest.fixture(scope="module", params=["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def served(request, checkpoints) -> Iterator[tuple[LLM, LLM]]:
    """An engine with few pages and drafts, and one that runs one request at a time without."""
    if request.param == "eagle3":
        target = checkpoints.target("llama")
        folder, head = target.folder, checkpoints.eagle3(target).folder
    else:
        target = checkpoints.target("qwen3_5_text", num_hidden_layers=2)
        folder = head = checkpoints.mtp(target).folder
    drafter = {"method": request.param, "model": str(head), "num_speculative_tokens": K}
    with (
        LLM(
            folder,
            speculative_config=drafter,
            max_num_seqs=4,
            num_pages=10,
            num_snapshots=2,
            **SIZES,
        ) as llm,
        LLM(folder, max_num_seqs=1, enable_prefix_caching=False, **SIZES) as alone,
    ):
        yield llm, alone


def test_tokens_are_those_of_each_request_alone(served):
    found = Found()
    for seed in range(SCHEDULES):
        found += run_real_schedule(*served, seed)
    assert not found.identity.mismatches
    assert len(found.identity.near_ties) < 0.02 * found.identity.num_outputs
    rare = "preemptions", "aborted", "prefix hits", "accepted"
    assert all(found.tally[name] > 3 for name in rare), found.tally
