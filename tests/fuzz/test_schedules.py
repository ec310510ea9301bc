"""Random schedules on a simulated device: some with fixed seeds, and some with new seeds.

`support/checked_engine.py` and `support/schedule_runs.py` say what is checked.
"""

from collections import Counter

import pytest
from support.schedule_runs import check_schedule
from support.seeds import new_seed

SCHEDULES = 200
OFTEN = {  # at least so many times in all of them
    "preemptions": 133,
    "preemptions in flight": 66,
    "mixed steps": 333,
    "chunks side by side": 33,
    "steps launched over another": 2000,
    "prefix hits": 2000,
    "waits for pages": 15,  # that another request is about to compute
    "prefix hits with windows": 1000,
    "windows that slid": 1000,
    "windows that ran out": 30,
    "snapshots restored": 20,
    "aborted": 66,
    "failures met": 20,
    "masks": 200,
    "rounds in another's shape": 150,
    "joined": 66,  # chunks and a round in one program
    "split": 33,  # some requests draft, in one program with the others
    "split in two": 66,
    "steps with requests held": 100,
    "rounds observed later": 100,
    "paths taken": 500,  # drafts from texts
}


def test_schedules():
    """All checks pass, and every kind of event occurs often enough."""
    counted: Counter = Counter()
    for seed in range(SCHEDULES):
        counted.update(check_schedule(seed))
    rare = {name: counted[name] for name, least in OFTEN.items() if counted[name] < least}
    assert not rare


@pytest.mark.parametrize(
    "count",
    [pytest.param(200, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.nightly)],
)
def test_new_schedules(record_property, count):
    """SPECJAX_TEST_SEED repeats a run. A failing schedule prints its own seed."""
    first = new_seed(record_property)
    for seed in range(first, first + count):
        check_schedule(seed)
