"""The demo checkpoints reach the figures in their cards and the README, on unseen prompts.

`specjax bench` measures them. Acceptance is counted on outputs with little repetition, because
loops are easy to draft.
"""

import argparse

import pytest

from specjax.bench.speculation import bench, read_settings
from specjax.commands.bench import add_arguments

pytestmark = pytest.mark.optimized  # as their figures are of programs that users have


def measure(*options):
    """Return the figures of `specjax bench` by method and K."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    figures, report = bench(read_settings(parser.parse_args(options)))
    assert report["num_compiles_while_measuring"] == 0
    return {(f.method, f.k): f for f in figures}


@pytest.fixture(scope="module")
def llama():
    return measure("--k", "3", "--num-prompts", "16")


@pytest.fixture(scope="module")
def hybrid():
    return measure("--model", "demo-qwen3.5", "--k", "3", "--num-prompts", "16")


@pytest.fixture(params=["llama", pytest.param("hybrid", marks=pytest.mark.nightly)])
def figures(request):
    return request.getfixturevalue(request.param)


def test_every_output_is_plain_decodings(figures):
    assert all(f.num_differing == 0 for f in figures.values())
    assert all(f.num_outputs >= 16 for f in figures.values())


def test_trained_drafters_are_accepted(figures):
    best = figures.get(("mtp", 3)) or figures["eagle3", 3]
    assert best.num_low_repeat >= best.num_outputs / 2
    assert best.mean_acceptance_length_low_repeat >= 2.2


@pytest.mark.nightly
def test_eagle3_is_accepted_more_often_than_eagle1():
    every = measure("--full", "--k", "3", "--num-prompts", "16")
    assert all(f.num_differing == 0 for f in every.values())
    eagle1, eagle3 = every["eagle", 3], every["eagle3", 3]
    assert every["dflash", 3].mean_acceptance_length_low_repeat > 2
    assert eagle3.mean_acceptance_length_low_repeat > eagle1.mean_acceptance_length_low_repeat > 1.5


@pytest.mark.nightly
def test_more_drafts_are_accepted_at_greater_k():
    hybrid = measure("--model", "demo-qwen3.5", "--k", "1,3", "--num-prompts", "16")
    lengths = [hybrid["mtp", k].mean_acceptance_length for k in (1, 3)]
    assert lengths == sorted(lengths)


def test_speculation_does_not_cost(figures):
    """The gain depends on the machine: on two machines, it was 2.0 and 1.2 times (see README)."""
    best = max(f.ratio.median for (method, _), f in figures.items() if method in ("eagle3", "mtp"))
    assert best >= 0.9  # a busy machine, too
