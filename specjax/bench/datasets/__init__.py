"""The data sets of `specjax bench`. To add a data set, add an entry to `DATASETS`.

This module imports nothing slow, so that --help is fast.
"""

from collections.abc import Mapping

from specjax.bench.datasets.custom import Custom
from specjax.bench.datasets.example import Dataset
from specjax.bench.datasets.made import PrefixRepetition, RandomTokens
from specjax.bench.datasets.questions import (
    SHIPPED,
    Categories,
    Questions,
    completion,
    first_turn,
    message,
)
from specjax.bench.datasets.sharegpt import ShareGPT
from specjax.bench.datasets.trace import Trace

GSM8K = "get test.jsonl from github.com/openai/grade-school-math"
HUMANEVAL = "get HumanEval.jsonl.gz from github.com/openai/human-eval"
MT_BENCH = "get data/mt_bench/question.jsonl of github.com/lm-sys/FastChat, fastchat/llm_judge"
SPEC_BENCH = "get data/spec_bench/question.jsonl from github.com/hemingkx/Spec-Bench"
DEFAULT = "gsm8k"

DATASETS: Mapping[str, Dataset] = {
    DEFAULT: Questions(read=message("question"), remedy=GSM8K, shipped=SHIPPED),
    "humaneval": Questions(read=completion("prompt"), remedy=HUMANEVAL),
    "mt-bench": Categories(read=first_turn, remedy=MT_BENCH),
    "spec-bench": Categories(read=first_turn, remedy=SPEC_BENCH),
    "sharegpt": ShareGPT(),
    "custom": Custom(),
    "random": RandomTokens(),
    "prefix-repetition": PrefixRepetition(),
    "trace": Trace(),
}
