"""The counters of an engine cover everything that ran, and are documented."""

import dataclasses
import re

import pytest
from support.engines import K
from support.scripts import TextScript
from support.texts import LETTERS_EOS, VOCAB, letters_folder, simulated_llm

from specjax import SamplingParams
from specjax.engine.metrics import Metrics

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = SamplingParams(temperature=0.8, seed=3, max_tokens=24)


@pytest.fixture(scope="module")
def llm(checkpoints):
    """A simulated LLM, some of whose outputs end before their maximum length."""
    script = TextScript(VOCAB, ids=(*range(VOCAB), *[LETTERS_EOS] * 6))
    with simulated_llm(letters_folder(checkpoints), "ngram", script=script) as llm:
        llm.generate([[i] for i in range(8)], HOT, use_tqdm=False)
        assert llm.metrics().requests_finished["stop"] > 0
        yield llm


def test_metrics_are_of_all_that_ran(llm):
    before = llm.metrics()
    params = dataclasses.replace(GREEDY, max_tokens=9)
    llm.generate([[1, 2, 3], [4] * 40], params, use_tqdm=False)
    stream = llm.generate_stream([[7] * 3] * 6, params)
    next(stream)
    during = llm.metrics()
    assert during.num_requests_running + during.num_requests_waiting == 6
    assert 0 < during.kv_cache_usage <= 1
    stream.close()
    after = llm.metrics()
    assert after.requests_finished["length"] - before.requests_finished["length"] == 2
    aborted = after.requests_finished["abort"] - before.requests_finished.get("abort", 0)
    assert aborted == 6
    assert after.num_requests_running == after.num_requests_waiting == 0
    assert after.kv_cache_usage == 0
    assert set(after.requests_finished) <= {"stop", "length", "abort", "error"}
    assert after.num_steps >= max(after.num_prefill_steps, after.num_decode_steps) > 0
    assert after.num_steps <= after.num_prefill_steps + after.num_decode_steps + 1
    assert sum(after.k_histogram.values()) == after.num_decode_steps
    assert after.prefix_cache_hits <= after.prefix_cache_queries
    assert after.prefix_cache_queries - before.prefix_cache_queries >= 43
    assert 0 < after.budget_use <= 1 and 0 <= after.in_flight_depth <= 1
    assert after.host_ms > 0 and after.wait_ms >= 0 and after.host_gap_ms > 0
    assert 1 <= after.mean_acceptance_length <= K + 1
    assert after.num_compiles_after_warmup == 0 < after.num_compilations
    shrunk = [
        name
        for name, value in after.as_dict().items()
        if name.startswith(("num_", "prefix_")) and value < before.as_dict()[name]
    ]
    assert shrunk == []


def test_metrics_for_prometheus(llm):
    llm.generate([[1, 2, 3], [4, 5]], HOT, use_tqdm=False)
    metrics = llm.metrics()
    text = metrics.as_prometheus()
    kinds, values = {}, {}
    for line in text.splitlines():
        if line.startswith("#"):
            name, kind = re.fullmatch(r"# TYPE (specjax:[a-z_]+) (counter|gauge)", line).groups()
            assert name not in kinds
            kinds[name] = kind
        else:
            match = re.fullmatch(r'(specjax:[a-z_]+)(\{[a-z_]+="[^"\\]+"\})? (-?[0-9.e+-]+)', line)
            assert match, line
            assert match[1] in kinds and (match[1], match[2]) not in values
            assert match[1].endswith("_total") == (kinds[match[1]] == "counter")
            values[match[1], match[2]] = float(match[3])
    assert text.endswith("\n") and not text.endswith("\n\n")
    for reason, count in metrics.requests_finished.items():
        label = f'{{finished_reason="{reason}"}}'
        assert values["specjax:request_success_total", label] == count
    for position, count in enumerate(metrics.num_accepted_tokens_per_pos):
        name = "specjax:spec_decode_num_accepted_tokens_per_pos_total"
        assert values[name, f'{{position="{position}"}}'] == count
    assert values["specjax:generation_tokens_total", None] == metrics.num_generation_tokens
    assert values["specjax:num_requests_running", None] == 0


def test_metrics_are_documented():
    """Every metric has a line in the docstring, unless its name is obvious."""
    documented = set(re.findall(r"^ +(\w+): ", Metrics.__doc__, re.MULTILINE))
    fields = {field.name for field in dataclasses.fields(Metrics)}
    assert documented <= fields
    obvious = r"num_\w+|mean_acceptance_length|compile_seconds"
    assert {name for name in fields - documented if not re.fullmatch(obvious, name)} == set()


def test_times_of_chunks_are_those_before_one_round(llm):
    """With a policy that learns nothing, the time of chunks is also reset after each round."""
    llm.generate([[1, 2, 3], [4] * 40], GREEDY, use_tqdm=False)
    assert llm.engine.clock.chunk_ms == 0
