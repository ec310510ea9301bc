"""Invalid settings of speculation are refused; errors name setting and value."""

import json
import math

import numpy as np
import pytest
from support.refusals import label, refusal

from specjax import SpeculativeConfig
from specjax.checks import parse_table
from specjax.methods import SUFFIX_OPTIONS

nan = math.nan
DRAFTER = {"method": "eagle3", "model": "folder"}
GOOD = DRAFTER | {"num_speculative_tokens": 3}
SYNTHETIC = {"verification": "synthetic"}
RATES = "synthetic_acceptance_rates"
LENGTH = "synthetic_acceptance_length"
TABLE = "num_speculative_tokens_per_batch_size"
PATH = {"dynamic_config_path": "profile.json"}

BAD_VALUES = {
    "method": [5, "eagle2"],
    "model": [None, 5],
    "num_speculative_tokens": [0, -1, 2.5, 3.0, "3", True, None, 65],
    "verification": ["typical", None, ["block"]],
    "draft_sample_method": ["best"],
    "aux_id_convention": ["x"],
    "adaptive": [1, None],
    "max_slowdown": [-0.1, 1.5, "0", True, None, 0.1],  # the last one without adaptive
    "dynamic_config_path": [5, "", True],
    "dynamic_config_force": [1, True],  # without a profile
    TABLE: [[], (), "1-4:3", {1: 3}, 3, np.array(3)],
}
NO_ARRAYS = "method", "verification", "adaptive", "dynamic_config_path", "prompt_lookup_max"
PAIR = np.array(["eagle3", "ngram"])
NO_RATES = [(0.5, 0.4), (), (0.5, 0.6, 0.1), (1.1, 0.6, 0.1), (0.5, 0.1, -0.1), (0.5, nan, 0.1)]
NO_RATES += [("0.5", 0.2, 0.1), 0.5, "abc"]
BAD_SETS = [
    *(({name: x}, [f"{name}={x!r}"]) for name, values in BAD_VALUES.items() for x in values),
    *(({name: PAIR}, [f"{name}=array(["]) for name in (*NO_ARRAYS, *SUFFIX_OPTIONS)),
    ({"sources": [PAIR]}, ["with=[array(["]),
    *((SYNTHETIC | {RATES: rates}, [RATES, rates]) for rates in NO_RATES),
    *((SYNTHETIC | {LENGTH: x}, [LENGTH, x, "1..4"]) for x in (0.9, 4.1, nan, "2", True)),
    (SYNTHETIC, [RATES, LENGTH]),
    (SYNTHETIC | {RATES: (0.5,) * 3, LENGTH: 2.0}, [RATES, LENGTH]),
    (SYNTHETIC | {"adaptive": True, RATES: (0.5,) * 4}, [RATES, "3 rates"]),
    (
        SYNTHETIC | PATH | {"num_speculative_tokens": None, LENGTH: 2.0},
        ["'synthetic'", "num_speculative_tokens", "dynamic_config_path"],
    ),
    ({RATES: (0.5,) * 3}, [RATES, "verification='synthetic'", "'seed_exact'"]),
    ({LENGTH: 2.0, "verification": "block"}, ["_length", "verification='synthetic'", "'block'"]),
    ({"num_spec_tokens": 3}, ["num_spec_tokens", "num_speculative_tokens"]),
    ({"adaptive": True, "num_speculative_tokens": 0}, ["num_speculative_tokens=0"]),
    (PATH | {"num_speculative_tokens": -1}, ["num_speculative_tokens=-1"]),
    *(
        ({"method": method, "model": None, name: value}, [f"{name}={value!r}", method, "leave it"])
        for method in ("ngram", "suffix")
        for name, value in (("kv_cache_dtype", "fp8"), ("head_dtype", "fp8"))
    ),
    (PATH | {"dynamic_config_force": 1}, ["dynamic_config_force=1"]),
    ({TABLE: [[1, 4, 3]], "adaptive": True}, [TABLE, "adaptive"]),
    (PATH | {TABLE: [[1, 4, 3]], "adaptive": True}, [TABLE, "dynamic_config_path", "adaptive"]),
]


@pytest.mark.parametrize("fields, words", BAD_SETS, ids=label)
def test_bad_speculative_config(fields, words):
    if "num_spec_tokens" not in fields:
        refusal(lambda: SpeculativeConfig(**GOOD | fields), *words)
    refusal(lambda: SpeculativeConfig.of(GOOD | fields), *words)


@pytest.mark.parametrize("config", [5, "eagle3", ["eagle3"]], ids=label)
def test_speculative_config_of_another_type(config):
    refusal(lambda: SpeculativeConfig.of(config), "speculative_config", repr(config))


NO_ENTRY = [1, 4], [1, 4, 3.0], [1, 4, "3"], [1, 4, True], [1, nan, 3], [0, 4, 3], [4, 1, 3]
BAD_TABLES = [
    *(([entry], [f"[0]={entry!r}"]) for entry in ("143", *NO_ENTRY)),
    ([1, 4, 3], ["[0]=1"]),
    *(([[1, 4, 3], entry], [f"[1]={entry!r}"]) for entry in ([5, 8, 2, 1], [6, 5, 2])),
    ([[2, 4, 3]], ["[0]=[2, 4, 3]", "size 1"]),
    ([[1, 4, 3], [4, 8, 2]], ["[1]=[4, 8, 2]", "size 4"]),
    ([[1, 4, 3], [9, 12, 1], [5, 8, 2]], ["[2]=[5, 8, 2]", "size 12"]),
    ([[1, 4, -1]], ["[0]=[1, 4, -1]", "0..3"]),
    ([[1, 4, 3], [5, 8, 4]], ["[1]=[5, 8, 4]", "0..3"]),
]


@pytest.mark.parametrize("table, words", BAD_TABLES, ids=label)
def test_bad_tables(table, words):
    refusal(lambda: parse_table(table, 3), *words)
    refusal(lambda: SpeculativeConfig(**GOOD, **{TABLE: table}), *words)


def test_a_table_is_kept_as_tuples_of_integers():
    expected = ((1, 4, 3), (5, 5, 2), (9, 64, 0))  # with a gap, 6 to 8
    for table in [list(map(list, expected)), expected, np.array(expected)]:
        config = SpeculativeConfig.of(GOOD | {TABLE: table})
        assert config.num_speculative_tokens_per_batch_size == expected == parse_table(table, 3)
        assert json.dumps(config.num_speculative_tokens_per_batch_size)
        assert hash(config) == hash(SpeculativeConfig.of(GOOD | {TABLE: expected}))


def test_speculative_config_as_a_value_or_a_mapping():
    config = SpeculativeConfig(**GOOD)
    assert SpeculativeConfig.of(GOOD) == SpeculativeConfig.of(config) == config
    for missing in GOOD:
        rest = {key: value for key, value in GOOD.items() if key != missing}
        refusal(lambda rest=rest: SpeculativeConfig.of(rest), "lacks", missing)


def test_how_many_drafts_dynamic_speculation_may_leave_out():
    def drafts(**fields):
        return SpeculativeConfig.of(DRAFTER | fields).num_speculative_tokens

    assert drafts(adaptive=True) == 5
    assert drafts(adaptive=True, num_speculative_tokens=2) == 2
    # Until the profile is read.
    assert drafts(**PATH) is drafts(**PATH, adaptive=True) is None
    assert drafts(**PATH, dynamic_config_force=True) is None
    assert drafts(**PATH, num_speculative_tokens=2) == 2
    rates = SYNTHETIC | {RATES: (0.5,) * 5, "adaptive": True}
    assert SpeculativeConfig.of(DRAFTER | rates).synthetic_rates == (0.5,) * 5
    for fields in {"adaptive": False}, {"dynamic_config_path": None}, {TABLE: [[1, 4, 3]]}:
        refusal(lambda fields=fields: drafts(**fields), "lacks", "num_speculative_tokens")


def test_numpy_numbers_in_a_speculative_config():
    good = GOOD | SYNTHETIC | {"num_speculative_tokens": np.int64(3)}
    assert SpeculativeConfig.of(good | {RATES: np.full(3, 0.5)}).synthetic_rates == (0.5, 0.5, 0.5)
    length = SpeculativeConfig.of(good | {LENGTH: np.float32(2.5)})
    assert length.synthetic_rates == (1.0, 0.5, 0.0)
    assert json.dumps(length.synthetic_rates)


def test_many_drafts_are_warned_of():
    """Without a warning, steps would compile for minutes. More than 64 drafts are an error."""
    assert SpeculativeConfig(**DRAFTER, num_speculative_tokens=16)
    for many in 17, 64:
        with pytest.warns(UserWarning, match=f"num_speculative_tokens={many}"):
            SpeculativeConfig(**DRAFTER, num_speculative_tokens=many)
