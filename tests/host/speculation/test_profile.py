"""Profiles: the figures they give for each K, and files that are refused."""

import copy
import json
import math
from pathlib import Path

import pytest
from host.speculation.baselines import SEED_MS, SEED_RATES
from support.refusals import label, refusal

from specjax.host.speculation.profile import MAX_BATCH, Profile

PER_TOKEN = "ms_per_context_token"
RATES, MOST = "acceptance_rate_per_pos", "max_num_speculative_tokens"
H100 = {
    "is_online": False,
    "batch_stats": {str(b): {str(k): ms for k, ms in row.items()} for b, row in SEED_MS.items()},
    MOST: 5,
    RATES: list(SEED_RATES),
}
# Printed in vLLM #32374, of Ks 0 to 5, by batch size; 128 is between two that were measured.
TPOT = {
    1: [6.52, 4.38, 3.91, 3.88, 4.03, 4.25],
    4: [6.60, 4.44, 3.97, 3.95, 4.08, 4.28],
    16: [6.90, 4.67, 4.19, 4.18, 4.36, 4.61],
    64: [7.77, 5.74, 5.59, 5.93, 6.38, 6.93],
    128: [10.01, 9.21, 9.27, 10.08, 11.21, 12.50],
    256: [14.49, 16.14, 16.64, 18.39, 20.87, 23.63],
}
BEST = {1: 3, 4: 3, 16: 3, 64: 2, 128: 1, 256: 0}


def test_the_published_profile():
    profile = Profile.of(H100, "here")
    compared = profile.table(list(TPOT))
    rounded = {b: [round(row[k], 2) for k in range(6)] for b, row in compared.tpot_ms.items()}
    assert rounded == TPOT and compared.best_k == BEST
    assert profile.as_table() == ((1, 17, 3), (18, 110, 2), (111, 169, 1), (170, 256, 0))


def test_the_smallest_of_equal_ks_is_best():
    # With every draft accepted, and a draft as dear as a step, no K gains or loses anything.
    times = {"2": {"0": 2, "1": 4.0, "2": 6.0}}  # numbers may be integers
    profile = Profile.of(small(batch_stats=times, acceptance_rate_per_pos=[1, 1.0]), "here")
    assert profile.table([1]).tpot_ms == {1: {0: 2.0, 1: 2.0, 2: 2.0}}
    assert profile.table([1]).best_k == {1: 0} and profile.as_table() == ((1, 2, 0),)
    assert all(isinstance(rate, float) for rate in profile.rates)


@pytest.mark.parametrize(
    "measured", [None, {}, {"model": "ab12", "device": "an H200", "seconds": [1, 2.5]}]
)
def test_read_what_was_written(tmp_path, measured):
    content = H100 if measured is None else H100 | {"measured": measured}
    profile = Profile.of(content, "here")
    assert profile.measured == measured and profile.as_json() == content
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.as_json()))
    assert Profile.read(path) == Profile.read(str(path)) == profile


def test_times_are_of_steps_without_context_if_it_says_what_that_adds():
    ks, batches = (0, 1, 2), (64,)
    times = [
        Profile.of(small(measured=measured), "here").cost(ks, batches).ms(64, 2, num_context)
        for measured in ({}, {PER_TOKEN: 0.01})
        for num_context in (0, 500)
    ]
    assert times == pytest.approx([6.0, 6.0, 6.0, 11.0])


def small(**changes):
    """Return the content of a valid profile; `changes` replace its fields."""
    return {
        "is_online": False,
        "batch_stats": {"1": {"0": 2.0, "1": 3.0}, "64": {"0": 4.0, "2": 6.0}},
        MOST: 2,
        RATES: [0.6, 0.3],
        "measured": {"model": "ab12"},
    } | changes


def batch_64(**changes):
    """Return the content of a valid profile; `changes` replace times of batch size 64."""
    content = copy.deepcopy(small())
    content["batch_stats"]["64"] |= changes
    return content


nan, inf = math.nan, math.inf
KEYS = {"0": 1.0, "1": 2.0}
BAD = [
    *((x, ["must hold a JSON object", "batch_stats"]) for x in ([small()], "text", 5, None)),
    ({}, [f"lacks is_online, batch_stats, {MOST}, {RATES}", "profile again"]),
    (small(step_ms={}), ["unknown keys ['step_ms']", "known keys are is_online"]),
    *((small(is_online=x), [f"is_online={x!r}", "true"]) for x in (1, "true", None)),
    *((small(**{MOST: x}), [f"{MOST}={x!r}", "at least 1"]) for x in (0, 2.0, True, "2", None)),
    *((small(batch_stats=x), [f"batch_stats={x!r}", "milliseconds"]) for x in ({}, [], 3)),
    *(
        (small(batch_stats={x: KEYS}), [f'batch_stats["{x}"]', "integer in 1.."])
        for x in ("0", "-1", "1.0", "01", " 1", "1_0", "", "٣", "²")
    ),
    (small(batch_stats={str(MAX_BATCH + 1): {}}), [f'["{MAX_BATCH + 1}"]', str(MAX_BATCH)]),
    (small(batch_stats={"9" * 5000: {}}), ["integer in 1.."]),
    *(
        (small(batch_stats={"64": x}), [f'batch_stats["64"]={x!r}', "must be an object"])
        for x in ([], None, "text")
    ),
    *(
        (batch_64(**{"2": x}), [f'batch_stats["64"]["2"]={x!r}', "1e-06..1e+09", "milliseconds"])
        for x in (-1.0, 0, -0.0, 5e-324, 1e308, nan, inf, True, "6.0", None)
    ),
    (batch_64(**{"2": 10**400}), ['batch_stats["64"]["2"]=1', "1e-06..1e+09"]),
    *(
        (batch_64(**{x: 5.0}), [f'batch_stats["64"]["{x}"]=5.0', "0..2", MOST])
        for x in ("3", "-1", "1.0", "01", "")
    ),
    (small(batch_stats={"64": {"1": 2.0}}), ['batch_stats["64"]', "lacks K=0"]),
    (small(batch_stats={"64": {"0": 2.0}}), ['batch_stats["64"]', "only K=0"]),
    *(
        (small(**{RATES: x}), [f"{RATES}={x!r}", "must list 2 rates", MOST])
        for x in ([0.5], [0.5, 0.4, 0.3], None, "ab")
    ),
    *(
        (small(**{RATES: [0.5, x]}), [f"{RATES}[1]={x!r}", "[0, 1]"])
        for x in (-0.1, 1.1, nan, True, "0.3")
    ),
    # The usual mistake: of the steps that accept the draft before, the part that accepts this one.
    (small(**{RATES: [0.6, 0.7]}), [f"{RATES}[1]=0.7", "exceeds the 0.6", "unconditional"]),
    *((small(measured=x), [f"measured={x!r}", "object"]) for x in (None, [])),
    (small(measured={"model": 5}), ['measured["model"]=5', "fingerprint"]),
    (small(measured={"device": 80}), ['measured["device"]=80', "kind of the device"]),
    *(
        (small(measured={PER_TOKEN: x}), [f'measured["{PER_TOKEN}"]={x!r}', "0..1000"])
        for x in (-1e-4, 1e308, nan, None)
    ),
]


@pytest.mark.parametrize("content, words", BAD, ids=label)
def test_bad_entries_are_named(tmp_path, content, words):
    message = refusal(lambda: Profile.of(content, "made.json"), *words)
    assert message.startswith("made.json: ") and len(message) < 400
    # Through a file it is the same, for Python writes and reads NaN and Infinity.
    path = tmp_path / "made.json"
    path.write_text(json.dumps(content))
    refusal(lambda: Profile.read(path), message.replace("made.json", str(path), 1))


@pytest.mark.parametrize(
    "text, word",
    [
        ("", "is not JSON"),
        (json.dumps(small())[:-1], "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "is not JSON"),
        (json.dumps(small()).replace('"64"', '"1"'), '"1" is twice'),
        (json.dumps(small()).replace('"2": 6.0', '"0": 6.0'), '"0" is twice in one object, as 4.0'),
        (json.dumps(small()).replace("6.0", "1e999"), '["64"]["2"]=inf'),
    ],
    ids=label,
)
def test_bad_texts(tmp_path, text, word):
    path = tmp_path / "made.json"
    path.write_text(text)
    assert refusal(lambda: Profile.read(path), word).startswith(f"{path}: ")


def test_files_that_cannot_be_read(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe{}")
    for path in (tmp_path, tmp_path / "none", binary, "a\0b", "$(touch x)"):
        message = refusal(lambda path=path: Profile.read(path), "`specjax profile`")
        assert message.startswith(f"{path}: cannot be read as a profile (")
    assert not Path("x").exists()
