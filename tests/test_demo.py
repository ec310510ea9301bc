"""The demo checkpoints do what their cards and the README say, on prompts they were not trained on.

The measurement is `specjax bench`'s own. Acceptance is counted on outputs with few repeats: loops
are easy to draft and would flatter it.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.bench.speculation import bench, read_settings
from specjax.checkpoint.demo import demo_folder
from specjax.checkpoint.save import save_checkpoint
from specjax.commands.bench import add_arguments
from specjax.device.drafters import eagle3
from specjax.device.models.registry import load_model
from specjax.llm import LLM
from specjax.sampling_params import SamplingParams
from specjax.train.target import init_params

optimized = pytest.mark.optimized  # as their figures are of programs that users have


def _settings(*options):
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_settings(parser.parse_args(options))


def _measure(*options):
    """The figures of `specjax bench` by method and K."""
    figures, report = bench(_settings(*options))
    assert report["num_compiles_while_measuring"] == 0
    return {(f.method, f.k): f for f in figures}


@pytest.fixture(scope="module")
def llama():
    return _measure("--full", "--k", "3", "--num-prompts", "16")


@pytest.fixture(scope="module")
def hybrid():
    return _measure("--model", "demo-qwen3.5", "--k", "1,3", "--num-prompts", "16")


@pytest.fixture(params=["llama", "hybrid"])
def figures(request):
    return request.getfixturevalue(request.param)


@optimized
def test_every_output_is_plain_decodings(figures):
    assert all(f.num_differing == 0 for f in figures.values())
    assert all(f.num_outputs >= 16 for f in figures.values())


@optimized
def test_trained_drafters_are_accepted(figures):
    best = figures.get(("mtp", 3)) or figures["eagle3", 3]
    assert best.num_low_repeat >= best.num_outputs / 2
    assert best.mean_acceptance_length_low_repeat >= 2.2


@optimized
def test_eagle3_is_accepted_more_often_than_eagle1(llama):
    eagle1, eagle3 = llama["eagle", 3], llama["eagle3", 3]
    assert llama["dflash", 3].mean_acceptance_length_low_repeat > 2
    assert eagle3.mean_acceptance_length_low_repeat > eagle1.mean_acceptance_length_low_repeat > 1.5


@optimized
def test_more_drafts_are_accepted_at_greater_k(hybrid):
    lengths = [hybrid["mtp", k].mean_acceptance_length for k in (1, 3)]
    assert lengths == sorted(lengths)


@optimized
def test_speculation_does_not_cost(figures):
    """What it gains is the machine's: the README has 2.0 and 1.2 times, of two machines."""
    best = max(f.ratio.median for (method, _), f in figures.items() if method in ("eagle3", "mtp"))
    assert best >= 0.9  # a busy machine, too


def test_an_untrained_drafter_is_rarely_accepted(tmp_path):
    folder = demo_folder("demo-llama")
    target, _ = load_model(folder, np.dtype("float32"))
    head = eagle3.Eagle3Head(
        shape=replace(target, num_layers=1),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=(2, 6, 9),
    )
    params = init_params(head.specs(), jax.random.key(0))
    save_checkpoint(tmp_path, head.specs(), params, eagle3.to_hf(head), dtype=np.dtype("float32"))
    config = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
    sizes = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 32,
        "max_model_len": 256,
        "verbose": False,
    }
    prompts = ["Question: A farmer has 12 cows and buys 5 more. How many has he now?\nAnswer:"]
    greedy = SamplingParams(temperature=0, max_tokens=48)
    with LLM(folder, speculative_config=config, **sizes) as llm, LLM(folder, **sizes) as plain:
        speculated = llm.generate(prompts, greedy, use_tqdm=False)
        assert llm.metrics().mean_acceptance_length < 1.15
        expected = plain.generate(prompts, greedy, use_tqdm=False)
    assert speculated[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
