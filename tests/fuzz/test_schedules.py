"""Random schedules on a simulated device; the benchmark runs thousands of them.

What each of them checks is in `simulated_engine.py` and `schedule_runs.py`.
"""

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCHEDULES = 300
OFTEN = {  # at least so many times in all of them
    "preemptions": 200,
    "preemptions in flight": 100,
    "mixed steps": 500,
    "chunks side by side": 50,
    "rounds in one dispatch": 100,
    "steps launched over another": 3000,
    "prefix hits": 3000,
    "snapshots restored": 30,
    "aborted": 100,
    "failures met": 30,
    "masks": 300,
}


@pytest.fixture(scope="module")
def runs() -> Iterator[Any]:
    """What runs schedules, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("schedule_runs")


def test_schedules(runs):
    """Nothing goes wrong in any, and they come to all there is."""
    counted: Counter = Counter()
    for seed in range(SCHEDULES):
        counted.update(runs.check_schedule(seed))
    rare = {name: counted[name] for name, least in OFTEN.items() if counted[name] < least}
    assert not rare
