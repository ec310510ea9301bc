"""Random schedules on real engines with tiny models: each request has the tokens of a run alone."""

from collections.abc import Iterator

import pytest
from support.engines import make_llm
from support.real_schedules import Found, run_real_schedule
from support.shared_models import NUM_SNAPSHOTS, eagle3, hybrid, llama

from specjax import LLM

pytestmark = pytest.mark.slow

# Together, the seeds of each tuple have every rare event.
SEEDS = [(3, 4, 6, 10, 13, 15), pytest.param((0, 9, 14, 16, 17, 18), marks=pytest.mark.nightly)]


@pytest.fixture(scope="module", params=["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def served(request, checkpoints) -> Iterator[tuple[LLM, LLM]]:
    """An engine with drafts, also from texts, and an engine that runs requests one at a time."""
    folder = head = hybrid(checkpoints)
    if request.param == "eagle3":
        folder, head = llama(checkpoints).folder, eagle3(checkpoints).folder
    snapshots = {"num_snapshots": NUM_SNAPSHOTS}
    with (
        make_llm(folder, request.param, head, speculation={"with": ["suffix"]}, **snapshots) as llm,
        make_llm(folder, enable_prefix_caching=False, **snapshots) as alone,
    ):
        yield llm, alone


@pytest.mark.parametrize("seeds", SEEDS, ids=["some", "more"])
def test_tokens_are_those_of_each_request_alone(served, seeds):
    found, counts = Found(), served[0].engine.scheduler.suggester.counts
    counts.clear()
    for seed in seeds:
        found += run_real_schedule(*served, seed)
    assert not found.identity.mismatches
    assert len(found.identity.near_ties) < 0.02 * found.identity.num_outputs
    rare = "preemptions", "aborted", "prefix hits", "accepted"
    assert all(found.tally[name] > 3 for name in rare), found.tally
    assert counts["suffix"].num_accepted_tokens > 10
