"""Speculation that cannot be configured is refused by name, value and remedy."""

import json
import math

import numpy as np
import pytest
from support.refusals import label, refusal

from specjax import SpeculativeConfig
from specjax.checks import parse_table

nan = math.nan
SYNTHETIC = {"verification": "synthetic"}
RATES = "synthetic_acceptance_rates"
LENGTH = "synthetic_acceptance_length"
TABLE = "num_speculative_tokens_per_batch_size"
PATH = {"dynamic_config_path": "profile.json"}


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"verification": "typical"}, ["verification='typical'", "seed_exact, rejection, block"]),
        ({"verification": None}, ["verification=None", "rejection"]),
        ({"verification": ["block"]}, ["verification=['block']", "rejection"]),
        (SYNTHETIC, [RATES, LENGTH, "needs"]),
        (SYNTHETIC | {RATES: (0.5,) * 3, LENGTH: 2.0}, [RATES, LENGTH]),
        ({RATES: (0.5,) * 3}, [RATES, "verification='synthetic'", "'seed_exact'"]),
        (
            {LENGTH: 2.0, "verification": "block"},
            ["_length", "verification='synthetic'", "'block'"],
        ),
        (SYNTHETIC | {RATES: (0.5, 0.4)}, [RATES, "(0.5, 0.4)", "3 rates"]),
        (SYNTHETIC | {RATES: ()}, [RATES, "3 rates"]),
        (SYNTHETIC | {RATES: (0.5, 0.6, 0.1)}, [RATES, "none above"]),
        (SYNTHETIC | {RATES: (1.1, 0.6, 0.1)}, [RATES, "[0, 1]"]),
        (SYNTHETIC | {RATES: (0.5, 0.1, -0.1)}, [RATES, "[0, 1]"]),
        (SYNTHETIC | {RATES: (0.5, nan, 0.1)}, [RATES, "[0, 1]"]),
        (SYNTHETIC | {RATES: ("0.5", 0.2, 0.1)}, [RATES, "0.5", "[0, 1]"]),
        (SYNTHETIC | {RATES: 0.5}, [RATES, "0.5", "3 rates"]),
        (SYNTHETIC | {RATES: "abc"}, [RATES, "abc", "3 rates"]),
        (SYNTHETIC | {LENGTH: 0.9}, [LENGTH, "0.9", "1..4"]),
        (SYNTHETIC | {LENGTH: 4.1}, [LENGTH, "4.1", "1..4"]),
        (SYNTHETIC | {LENGTH: nan}, [LENGTH, "nan", "1..4"]),
        (SYNTHETIC | {LENGTH: "2"}, [LENGTH, "2", "1..4"]),
        (SYNTHETIC | {LENGTH: True}, [LENGTH, "True", "1..4"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens=0", "at least 1"]),
        ({"num_speculative_tokens": 3.0}, ["num_speculative_tokens=3.0"]),
        ({"num_speculative_tokens": "3"}, ["num_speculative_tokens='3'"]),
        ({"num_speculative_tokens": True}, ["num_speculative_tokens=True"]),
        ({"num_speculative_tokens": None}, ["num_speculative_tokens=None", "at least 1"]),
        ({"adaptive": True, "num_speculative_tokens": 0}, ["num_speculative_tokens=0"]),
        ({"adaptive": 1}, ["adaptive=1", "True or False"]),
        ({"adaptive": None}, ["adaptive=None", "True or False"]),
        (PATH | {"num_speculative_tokens": -1}, ["num_speculative_tokens=-1", "at least 1"]),
        ({"dynamic_config_path": 5}, ["dynamic_config_path=5", "profile's path"]),
        ({"dynamic_config_path": ""}, ["dynamic_config_path=''", "profile's path"]),
        ({"dynamic_config_path": True}, ["dynamic_config_path=True", "profile's path"]),
        (PATH | {"dynamic_config_force": 1}, ["dynamic_config_force=1", "True or False"]),
        ({"dynamic_config_force": True}, ["dynamic_config_force=True", "name the profile"]),
        ({TABLE: [[1, 4, 3]], "adaptive": True}, [TABLE, "adaptive", "keep one"]),
        (
            PATH | {TABLE: [[1, 4, 3]], "adaptive": True},
            [f"{TABLE} and dynamic_config_path and adaptive", "keep one"],
        ),
        (
            SYNTHETIC | PATH | {"num_speculative_tokens": None, LENGTH: 2.0},
            ["'synthetic'", "needs", "num_speculative_tokens", "dynamic_config_path"],
        ),
        (SYNTHETIC | {"adaptive": True, RATES: (0.5,) * 4}, [RATES, "3 rates"]),
        ({"model": None}, ["speculative_config.model=None"]),
        ({"model": 5}, ["speculative_config.model=5"]),
        ({"method": 5}, ["method=5", "eagle3"]),
    ],
    ids=label,
)
def test_bad_speculative_config(fields, words):
    good = {"method": "eagle3", "model": "folder", "num_speculative_tokens": 3}
    refusal(lambda: SpeculativeConfig(**good | fields), *words)
    refusal(lambda: SpeculativeConfig.of(good | fields), *words)


@pytest.mark.parametrize(
    "table, words",
    [
        ([], [f"{TABLE}=[]", "[lo, hi, K]"]),
        ((), [f"{TABLE}=()", "[lo, hi, K]"]),
        ("1-4:3", [f"{TABLE}='1-4:3'", "[lo, hi, K]"]),
        ({1: 3}, [f"{TABLE}={{1: 3}}", "[lo, hi, K]"]),
        (3, [f"{TABLE}=3", "[lo, hi, K]"]),
        ([1, 4, 3], ["[0]=1", "three integers"]),
        (["143"], ["[0]='143'", "three integers"]),
        ([[1, 4]], ["[0]=[1, 4]", "three integers"]),
        ([[1, 4, 3], [5, 8, 2, 1]], ["[1]=[5, 8, 2, 1]", "three integers"]),
        ([[1, 4, 3.0]], ["[0]=[1, 4, 3.0]", "three integers"]),
        ([[1, 4, "3"]], ["[0]=[1, 4, '3']", "three integers"]),
        ([[1, 4, True]], ["[0]=[1, 4, True]", "three integers"]),
        ([[1, nan, 3]], ["[0]=[1, nan, 3]", "three integers"]),
        ([[0, 4, 3]], ["[0]=[0, 4, 3]", "1 <= lo <= hi"]),
        ([[4, 1, 3]], ["[0]=[4, 1, 3]", "1 <= lo <= hi"]),
        ([[1, 4, 3], [6, 5, 2]], ["[1]=[6, 5, 2]", "1 <= lo <= hi"]),
        ([[2, 4, 3]], ["[0]=[2, 4, 3]", "begin at batch size 1"]),
        ([[1, 4, 3], [4, 8, 2]], ["[1]=[4, 8, 2]", "above batch size 4", "overlaps"]),
        ([[1, 4, 3], [9, 12, 1], [5, 8, 2]], ["[2]=[5, 8, 2]", "above batch size 12"]),
        ([[1, 4, -1]], ["[0]=[1, 4, -1]", "0..3"]),
        ([[1, 4, 3], [5, 8, 4]], ["[1]=[5, 8, 4]", "0..3", "num_speculative_tokens"]),
    ],
    ids=label,
)
def test_bad_tables(table, words):
    good = {"method": "eagle3", "model": "folder", "num_speculative_tokens": 3}
    refusal(lambda: parse_table(table, 3), *words)
    refusal(lambda: SpeculativeConfig(**good, **{TABLE: table}), *words)


def test_a_table_is_kept_as_tuples_of_integers():
    good = {"method": "eagle3", "model": "folder", "num_speculative_tokens": 3}
    expected = ((1, 4, 3), (5, 5, 2), (9, 64, 0))  # with a gap, 6 to 8
    for table in [list(map(list, expected)), expected, np.array(expected)]:
        config = SpeculativeConfig.of(good | {TABLE: table})
        assert config.num_speculative_tokens_per_batch_size == expected == parse_table(table, 3)
        assert json.dumps(config.num_speculative_tokens_per_batch_size)
        assert hash(config) == hash(SpeculativeConfig.of(good | {TABLE: expected}))


def test_how_many_drafts_dynamic_speculation_may_leave_out():
    drafter = {"method": "eagle3", "model": "folder"}
    assert SpeculativeConfig.of(drafter | {"adaptive": True}).num_speculative_tokens == 5
    resumed = drafter | PATH | {"adaptive": True}
    assert SpeculativeConfig.of(resumed).num_speculative_tokens is None  # the profile says it
    two = drafter | {"num_speculative_tokens": 2}
    assert SpeculativeConfig.of(two | {"adaptive": True}).num_speculative_tokens == 2
    # Until the profile is read.
    assert SpeculativeConfig.of(drafter | PATH).num_speculative_tokens is None
    assert SpeculativeConfig.of(two | PATH).num_speculative_tokens == 2
    assert SpeculativeConfig.of(drafter | PATH | {"dynamic_config_force": True})
    rates = SYNTHETIC | {RATES: (0.5,) * 5, "adaptive": True}
    assert SpeculativeConfig.of(drafter | rates).synthetic_rates == (0.5,) * 5
    for fields in {}, {"adaptive": False}, {"dynamic_config_path": None}, {TABLE: [[1, 4, 3]]}:
        refusal(lambda f=fields: SpeculativeConfig.of(drafter | f), "lacks", "num_speculative")


@pytest.mark.parametrize("config", [5, "eagle3", ["eagle3"]], ids=label)
def test_speculative_config_of_another_type(config):
    refusal(lambda: SpeculativeConfig.of(config), "speculative_config", repr(config))


def test_numpy_numbers_in_a_speculative_config():
    good = {"method": "eagle3", "model": "folder", "num_speculative_tokens": np.int64(3)}
    rates = SpeculativeConfig(**good, **SYNTHETIC, synthetic_acceptance_rates=np.full(3, 0.5))
    assert rates.synthetic_rates == (0.5, 0.5, 0.5)
    length = SpeculativeConfig(**good, **SYNTHETIC, synthetic_acceptance_length=np.float32(2.5))
    assert length.synthetic_rates == (1.0, 0.5, 0.0)
    assert json.dumps(length.synthetic_rates)


def test_many_drafts_are_warned_of_and_more_are_refused():
    """They would be compiled for minutes before anything is said."""
    drafter = {"method": "eagle3", "model": "folder"}
    assert SpeculativeConfig(**drafter, num_speculative_tokens=16).num_speculative_tokens == 16
    with pytest.warns(UserWarning, match="num_speculative_tokens=17: every draft is compiled into"):
        SpeculativeConfig(**drafter, num_speculative_tokens=17)
    refusal(
        lambda: SpeculativeConfig(**drafter, num_speculative_tokens=65),
        *("num_speculative_tokens=65", "exceeds 64", "lower it"),
    )
