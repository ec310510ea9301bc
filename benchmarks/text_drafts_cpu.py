"""Compares drafts from texts with drafts of a head on the demo: acceptance length and tokens/s.

    python benchmarks/text_drafts_cpu.py
    python benchmarks/text_drafts_cpu.py --spec-bench question.jsonl --humaneval HumanEval.jsonl.gz

The prompts are questions of `specjax bench` and, from files, of Spec-Bench and HumanEval. Code
edits are made from HumanEval: a function, and the request to rename it. Each prompt is decoded
alone by all engines in turn. Then all prompts of the data set are decoded once more, so that
`suffix` finds earlier outputs of the same prompts.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from report import RESULTS, provenance, summary, write_result

from specjax.bench.comparison import load_llm, warm_up
from specjax.bench.datasets.example import RowSource, read_rows
from specjax.bench.devices import share_target
from specjax.bench.measure import PLAIN, Configuration, measure
from specjax.bench.report import Figures, summarise
from specjax.bench.settings import BenchSettings
from specjax.bench.workload import make_requests, read_questions, tokenize
from specjax.checkpoint.demo import DRAFTERS, TARGET, demo_folder
from specjax.engine.engine import Engine
from specjax.host.request import Request
from specjax.text.tokenizer import ChatTokenizer, load_tokenizer

HEAD = {"method": "eagle3", "model": DRAFTERS[TARGET]["eagle3"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "eagle3": HEAD,
    "eagle3+suffix": {**HEAD, "with": ["suffix"]},
}
NEW_NAME = "compute_result"


def main() -> None:
    """Run all engines on all data sets, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--spec-bench", type=Path, help="its question.jsonl")
    parser.add_argument("--humaneval", type=Path, help="its HumanEval.jsonl.gz")
    parser.add_argument("--prompts", type=int, default=8, help="per set; default: %(default)s")
    parser.add_argument("--k", type=int, default=5, help="drafts; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=96, help="default: %(default)s")
    options = parser.parse_args()
    source = provenance()
    settings = BenchSettings(
        model=TARGET, drafters=CONFIGS, ks=(options.k,), batch_size=1, num_prompts=1, rounds=1,
        max_tokens=options.max_tokens, max_model_len=1024, temperature=0.0, seed=0, dtype="float32",
    )  # fmt: skip
    tokenizer = load_tokenizer(demo_folder(TARGET))
    assert tokenizer is not None
    sets = {
        name: make_prompts(texts, tokenizer, settings, options.prompts)
        for name, texts in read_sets(options.spec_bench, options.humaneval).items()
    }
    rows: list[list[Any]] = []
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for method in (PLAIN, *CONFIGS):
            engines[method] = stack.enter_context(load_llm(settings, method)).engine
            share_target(engines[method], engines[PLAIN])
            warm_up(engines, settings.of_method(method), [next(iter(sets.values()))[0]])
        for name, requests in sets.items():
            for visit in "first", "second":
                found = run(engines, settings.configurations, requests)
                rows += [[name, visit, *row_of(one)] for one in found]
                for row in rows[-len(found) :]:
                    print(*(f"{x:.2f}" if isinstance(x, float) else x for x in row), sep="\t")
    table = {
        "title": f"Up to {options.k} drafts per step, batch size 1, greedy",
        "columns": [
            "prompts", "time", "drafter", "steps", "acceptance length", "tokens/s", "x plain",
            "accepted by source", "outputs that differ",
        ],
        "rows": rows,
        "notes": [
            f"{options.prompts} prompts per data set, up to {options.max_tokens} tokens each; "
            "decoding alone is timed. Each prompt is decoded by all drafters in turn, and ratios "
            "are of the same prompt. At the second time, the same prompts come again."
        ],
    }  # fmt: skip
    result = {
        "title": "Drafts from texts on a CPU",
        "description": f"{TARGET} in float32, with its EAGLE-3 head.",
        "provenance": source,
        "settings": {
            name: value.name if isinstance(value, Path) else str(value)
            for name, value in vars(options).items()
        },
        "tables": [table],
    }
    write_result(RESULTS / "text_drafts_cpu.json", result)


def read_sets(spec_bench: Path | None, humaneval: Path | None) -> dict[str, list[str]]:
    """Return the texts of all data sets by name. Without a file, its data sets are left out."""
    sets = {"questions of specjax bench": read_questions()}
    if spec_bench is not None:
        by_category: dict[str, list[str]] = {}
        for row in rows_of(spec_bench):
            by_category.setdefault(row["category"], []).append(row["turns"][0])
        groups = zip(*by_category.values(), strict=False)  # one question of each category in turn
        sets["Spec-Bench"] = [text for group in groups for text in group]
    if humaneval is not None:
        rows = list(rows_of(humaneval))
        sets["HumanEval"] = [row["prompt"] for row in rows]
        sets["HumanEval, renaming a function"] = [edit_of(row) for row in rows]
    return sets


def rows_of(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects of a file."""
    source = RowSource(path=path, count=0, random=Random(0), vocabulary=list, count_tokens=len)
    return (row.fields for row in read_rows(source, "name the data set's own file"))


def edit_of(row: Mapping[str, Any]) -> str:
    """Return a prompt that asks to rename a function, and begins the answer."""
    name, code = row["entry_point"], row["prompt"] + row["canonical_solution"]
    begun = row["prompt"].split(f"def {name}")[0]
    return f"{code}\n\n# The same, with {name} renamed to {NEW_NAME}:\n\n{begun}def {NEW_NAME}"


def make_prompts(
    texts: list[str], tokenizer: ChatTokenizer, settings: BenchSettings, count: int
) -> list[Request]:
    """Return the requests of the first `count` texts that are short enough."""
    longest = settings.max_model_len - settings.max_tokens
    prompts = [tokens for tokens in tokenize(texts, tokenizer) if len(tokens) <= longest]
    return make_requests(
        prompts[:count],
        max_tokens=settings.max_tokens,
        max_model_len=settings.max_model_len,
        temperature=settings.temperature,
        seed=settings.seed,
        stop_ids=(),
    )


def run(
    engines: Mapping[str, Engine],
    configurations: tuple[Configuration, ...],
    requests: list[Request],
) -> list[Figures]:
    """Return the figures of each configuration. Each request is decoded by all of them in turn."""
    rounds = list(measure(engines, configurations, [[request] for request in requests]))
    plain = [one[configurations[0]] for one in rounds]
    return [summarise(shown, [one[shown] for one in rounds], plain) for shown in configurations]


def row_of(figures: Figures) -> list[Any]:
    """Return the columns of the table that describe a drafter."""
    ratios = [one.times_plain for one in figures.rounds]
    accepted = ", ".join(
        f"{name} {counts['num_accepted']} of {counts['num_draft_tokens']}"
        for name, counts in figures.by_source.items()
    )
    return [
        figures.method, figures.num_steps, figures.mean_acceptance_length,
        figures.tokens_per_second, summary(ratios), accepted or "-", figures.num_differing,
    ]  # fmt: skip


if __name__ == "__main__":
    main()
