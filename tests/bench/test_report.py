"""Figures of made-up runs, for which every figure is known."""

import json
from pathlib import Path

import pytest

from specjax.bench.measure import PLAIN, Configuration, Run
from specjax.bench.report import (
    H100_MS,
    Spread,
    TextTable,
    cells,
    cost_line,
    count_differing,
    identity_line,
    repetition_line,
    summarise,
)

DISTINCT, LOOP = tuple(range(20)), (7,) * 20


def run(key=0, output=DISTINCT, seconds=0.5, accepted=(6, 3)):
    num_tokens = len(output) - 1
    num_steps = num_tokens - sum(accepted)
    return Run(
        outputs={key: output},
        seconds=seconds,
        num_steps=num_steps,
        num_tokens=num_tokens,
        num_request_steps=num_steps,
        num_accepted_per_pos=accepted,
    )


def plain_run(key=0, output=DISTINCT, seconds=1.0):
    return run(key, output, seconds, accepted=())


PLAIN_ONE, K2 = Configuration(PLAIN, 0), Configuration("eagle3", 2)


def test_figures_of_one_run():
    figures = summarise(K2, [run()], [plain_run()])
    assert figures.configuration == "eagle3 K=2"
    assert (figures.num_tokens, figures.num_steps, figures.seconds) == (19, 10, 0.5)
    assert figures.tokens_per_second == 38 and figures.ms_per_step == 50
    assert figures.ms_per_token.median == pytest.approx(1e3 / figures.tokens_per_second)
    assert figures.mean_acceptance_length == 1.9
    assert figures.acceptance_per_position == (0.6, 0.3)
    assert figures.mean_acceptance_length == pytest.approx(1 + sum(figures.acceptance_per_position))
    assert figures.ratio == Spread(2, 2, 2)
    assert figures.num_differing == 0 and figures.num_low_repeat == 1
    deep = run(accepted=(6, 3, 0, 0, 0))  # the counters had seen K = 5
    assert summarise(K2, [deep], [plain_run()]).acceptance_per_position == (0.6, 0.3)


def test_the_ratio_is_what_the_row_itself_shows():
    """The medians of rates, of ratios and of times would each come from another round.

    The machine is four times slower in the last round. Ratios within a round are not affected, but
    medians of the separate figures are.
    """
    base = [plain_run(i, seconds=seconds) for i, seconds in enumerate((1, 1, 4))]
    runs = [
        run(0, seconds=0.9),
        run(1, seconds=0.4, accepted=(9, 3)),
        run(2, seconds=0.7, accepted=(2, 1)),
    ]
    figures = summarise(K2, runs, base)
    assert figures.tokens_per_second == 57 / 2 and figures.plain_tokens_per_second == 57 / 6
    assert figures.times_plain == 3 and figures.ratio.median == pytest.approx(2.5)
    # At batch size 1 it is the tokens of a step by its cost.
    assert figures.times_plain == pytest.approx(
        figures.mean_acceptance_length / figures.plain_steps
    )
    assert figures.plain_steps == pytest.approx((2 / 33) / (6 / 57))
    assert cells(figures)[1:4] == ("28", "10", "3.00")


def test_loops_are_left_out_of_the_low_repeat_length():
    runs = [run(0), run(1, LOOP, accepted=(9, 3))]
    figures = summarise(K2, runs, [plain_run(0), plain_run(1, LOOP)])
    assert figures.mean_acceptance_length == 38 / 17
    assert figures.mean_acceptance_length_low_repeat == 1.9
    assert figures.num_outputs == 2 and figures.num_low_repeat == 1
    assert figures.repeated_8gram_share == 12 / 26
    base = [plain_run(0), plain_run(1, LOOP)]
    line = repetition_line([summarise(PLAIN_ONE, base, base), figures])
    assert "1 of 2 outputs have 10% or more; without them AL is 1.90 (eagle3 K=2)" in line
    only_loops = summarise(K2, runs[1:], [plain_run(1, LOOP)])
    assert only_loops.mean_acceptance_length_low_repeat is None


def test_identity_turns_false_when_one_token_differs():
    base = [plain_run(0), plain_run(1)]
    same = [run(0), run(1)]
    other = [run(0), run(1, (*DISTINCT[:-1], 99))]
    assert count_differing(same, base) == 0 and count_differing(other, base) == 1
    # A prompt that differs in one of two rounds differs.
    assert count_differing(same + other, base + base) == 1
    plain = summarise(PLAIN_ONE, base, base)
    yes = identity_line([plain, summarise(K2, same, base)])
    no = identity_line([plain, summarise(K2, other, base)])
    assert yes.endswith("yes (2 prompts)") and no.endswith("NO (eagle3 K=2: 1 of 2)")
    # After an interrupt: a row has run fewer prompts, or there is no row to compare.
    assert identity_line([plain, summarise(K2, same[:1], base[:1])]).endswith("yes (1 prompt)")
    assert identity_line([plain]) is None


def test_outputs_of_one_token_are_not_timed():
    ended = run(1, (5,), 1e-9, accepted=(0, 0))
    figures = summarise(K2, [run(0), ended], [plain_run(0), ended])
    assert figures.ratio == Spread(2, 2, 2) and figures.num_outputs == 2
    with pytest.raises(ValueError, match="nothing to time"):
        summarise(K2, [ended], [ended])


def test_rows_as_text_are_aligned_however_few_are_known():
    base = [plain_run()]
    table = TextTable(["plain", "eagle3 K=2"])
    rows = summarise(PLAIN_ONE, base, base), summarise(K2, [run()], base)
    lines = [table.header, *map(table.line, rows)]
    assert all(line.isascii() for line in lines)
    assert lines[2].split() == "eagle3 K=2 38 19 2.00 2.00-2.00 50.00 0.95 1.90 .60 .30".split()
    for name in "tokens/s", "ms/step", "AL":
        end = lines[0].index(name) + len(name)
        assert all(line[end - 1] != " " and not line[end : end + 2].strip() for line in lines)


def test_what_a_round_costs_and_what_follows():
    base = [plain_run()]
    one = summarise(Configuration("eagle3", 3), [run(accepted=(6, 3, 0))], base)
    line = cost_line([summarise(PLAIN_ONE, base, base), one], batch_size=1, platform="cpu")
    assert line.startswith("a round of 4 rows (eagle3 K=3) costs 1.0 plain steps on this CPU")
    assert "1.90 tokens instead of 1: 2.00x plain; an H100 takes 1.3 (" in line
    assert "EAGLE-1: 7.49 ms after 5.86 ms)" in line
    assert line.endswith("would give 1.5x")  # 1.9 tokens by 7.49 / 5.86
    for options in {"batch_size": 8, "platform": "cpu"}, {"batch_size": 1, "platform": "gpu"}:
        assert "H100" not in cost_line([one], **options)
    assert cost_line([summarise(PLAIN_ONE, base, base)], batch_size=1, platform="cpu") is None


def test_the_h100s_times_are_those_on_record():
    path = Path(__file__).parents[2] / "benchmarks/results/gpu.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = {
        record["k"]: round(record["ms_per_step"], 2)
        for record in records
        if record.get("what") == "step" and record.get("case") == "grid/1"
    }
    assert steps == H100_MS
