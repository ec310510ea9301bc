"""The progress of a call: as a bar, as a class like tqdm, or as log lines; simulated."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.scripts import TextScript
from support.texts import VOCAB, simulated_llm

from specjax import SamplingParams
from specjax.engine import progress

PARAMS = [
    SamplingParams(temperature=0, max_tokens=4 * i, ignore_eos=True, n=1 + (i == 2))
    for i in range(2, 8)
]
PROMPTS = [[i, i + 1, i + 2] for i in range(len(PARAMS))]
NUM_SAMPLES, NUM_TOKENS = 7, sum(params.n * params.max_tokens for params in PARAMS)


def make(letters, method=None, **options):
    return simulated_llm(letters, method, script=TextScript(VOCAB), verbose=True, **options)


@pytest.fixture(scope="module")
def plain(letters):
    with make(letters) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(letters):
    with make(letters, "ngram") as llm:
        yield llm


@pytest.fixture
def lines(caplog):
    """Return a function that returns the log lines so far."""
    caplog.set_level(logging.INFO, "specjax")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "specjax"]


@pytest.fixture
def terminal(monkeypatch):
    """Replace the terminal by a buffer, which is returned."""
    shown = StringIO()
    made = partial(Console, file=shown, force_terminal=True, width=200)
    monkeypatch.setattr(progress, "Console", lambda stderr: made())
    return shown


@pytest.fixture
def always(monkeypatch):
    """Show progress after every step, regardless of the time."""
    monkeypatch.setattr(progress, "BAR_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)


bars: list["Bar"] = []


class Bar:
    """A class with the methods of tqdm."""

    def __init__(self, total, **_):
        self.total, self.seen, self.postfix, self.is_closed = total, [], "", False
        bars.append(self)

    def update(self, number):
        self.seen.append((number, self.postfix))

    def close(self):
        self.is_closed = True


def test_loading_is_told_unless_the_llm_is_quiet(letters, lines, capfd):
    with simulated_llm(letters, verbose=False) as llm:
        llm.generate(PROMPTS, PARAMS)
    assert lines() == [] and capfd.readouterr() == ("", "")
    with make(letters):
        begun, done = lines()
    assert f"loading {letters}: " in begun and "float32" in begun and "kB of weights" in begun
    assert "ready after " in done and "compiling" in done


@pytest.mark.usefixtures("always")
def test_a_bar_moves_before_anything_has_finished(drafting):
    drafting.generate(PROMPTS, PARAMS, use_tqdm=Bar)
    bar = bars.pop()
    assert bar.total == NUM_SAMPLES == sum(number for number, _ in bar.seen) and bar.is_closed
    first = next(i for i, (number, _) in enumerate(bar.seen) if number)
    assert len({text for _, text in bar.seen[:first]}) == first > 1
    assert "4 running, 3 waiting" in bar.seen[1][1] and "0 running, 0 waiting" in bar.seen[-1][1]


def test_a_bar_is_told_five_times_a_second_at_most(plain, monkeypatch):
    """In this test, each step takes a hundredth of a second."""
    steps, step = [], plain.engine.step
    clock = SimpleNamespace(monotonic=lambda: len(steps) / 100)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(plain.engine, "step", lambda: steps.append(1) or step())
    plain.generate(PROMPTS, PARAMS, use_tqdm=Bar)
    assert len(steps) > 30 and len(bars.pop().seen) == len(steps) // 20 + 1


@pytest.mark.usefixtures("always")
def test_a_bar_on_a_terminal(plain, drafting, terminal, lines):
    plain.generate(PROMPTS, PARAMS)
    shown = terminal.getvalue()
    assert "generating" in shown and f"{NUM_SAMPLES}/{NUM_SAMPLES}" in shown
    assert "tokens/s" in shown and "acceptance length" not in shown
    drafting.generate(PROMPTS, PARAMS)
    assert "acceptance length" in terminal.getvalue() and lines() == []


@pytest.mark.usefixtures("always")
def test_lines_without_a_terminal(drafting, lines, capfd):
    before = drafting.metrics()
    drafting.generate(PROMPTS, PARAMS)
    after = drafting.metrics()
    *growing, last = lines()
    assert len(growing) > 5 and growing[1].endswith("4 running, 3 waiting")
    assert f"generated {NUM_TOKENS} tokens in " in last
    assert f"{NUM_SAMPLES}/{NUM_SAMPLES} finished" in last
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    per_round = 1 + accepted / (after.num_drafts - before.num_drafts)
    assert last.endswith(f", acceptance length {per_round:.2f}")
    assert capfd.readouterr() == ("", "")


def test_a_short_call_is_one_line(plain, lines):
    plain.generate(PROMPTS, PARAMS)
    plain.generate(PROMPTS, PARAMS, use_tqdm=False)
    (line,) = lines()
    assert f" s, {NUM_SAMPLES}/{NUM_SAMPLES} finished: " in line and line.endswith(" tokens/s")


def test_threads_have_a_bar_each(plain, terminal):
    """A console of rich can have only one live display at a time."""
    together = threading.Barrier(2)

    def work(_):
        together.wait()
        plain.generate(PROMPTS * 4, PARAMS * 4)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert terminal.getvalue().count("28/28") >= 2
