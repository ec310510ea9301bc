"""Runs `specjax bench compare`."""

import argparse
import json
from collections.abc import Iterable

from specjax.bench.reports.compare import Change, ResultChanges, compare
from specjax.bench.reports.content import brief, shown
from specjax.bench.reports.saved import Saved, read
from specjax.bench.table import format_table

_LEGEND = {
    "runs": "runs: from the spread of repeated results (Welch)",
    "rounds": "rounds: from the spread of rounds within each result (Welch); whether the machine "
    "was slower during a whole run is not known",
    "pairs": "pairs: from rounds on the same prompts (Student); whether the machine was slower "
    "during a whole run is not known, except for times_plain",
    "requests": "requests: from a bootstrap over requests; how runs differ from each other is not "
    "known, compare repeated ones: a1.json,a2.json b1.json,b2.json",
    "": "unknown: the results have too few rounds or requests, or no values per request, which "
    "bench serve writes with --save-detailed",
}
_WORDS = {True: "yes", False: "no", None: "unknown"}


def run(args: argparse.Namespace) -> int:
    """Compare two results.

    Return 1 if a figure is worse by more than --fail-over, and by more than noise. Otherwise return
    0.
    """
    limit = read_limit(args.fail_over)
    paths = read_paths(args.before), read_paths(args.after)
    before, after = ([read(path) for path in side] for side in paths)
    found = compare(before, after)
    failing = [
        one.key
        for one in found.changes
        if limit is not None and one.is_beyond_noise and one.worse > limit
    ]
    if args.json:
        print(json.dumps(as_json(found) | {"failing": failing}, indent=2))
    else:
        results = zip([*paths[0], *paths[1]], [*before, *after], strict=True)
        lines = [*settings_lines(found), *doubt_lines(results), *change_lines(found)]
        if failing:
            lines.append(f"worse by more than {args.fail_over}: {', '.join(failing)}")
        print("\n".join(lines))
    return 1 if failing else 0


def read_limit(text: str | None) -> float | None:
    """Return the number in --fail-over, a percentage like "5%". Return None if `text` is None.

    Raises:
        ValueError: the text is not a number of at least 0 followed by "%".
    """
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not (text.endswith("%") and 0 <= value < float("inf")):
        raise ValueError(f"--fail-over {text} must be per cent, like 5%")
    return value


def read_paths(text: str) -> list[str]:
    """Return the paths in a comma-separated list.

    Raises:
        ValueError: a path occurs twice, or is empty.
    """
    paths = text.split(",")
    if not all(paths):
        raise ValueError(f"{text!r} must name files, separated by single commas")
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path} is named twice; name the files of different runs")
    return paths


def settings_lines(found: ResultChanges) -> list[str]:
    """Return a table of the settings that differ, as lines."""
    if not found.settings:
        return ["settings, versions and machine: no difference", ""]
    rows = [[name, *map(brief, pair)] for name, pair in found.settings.items()]
    return [format_table([["differs", "A", "B"], *rows]), ""]


def doubt_lines(results: Iterable[tuple[str, Saved]]) -> list[str]:
    """Return lines with the reasons not to trust a result: other programs, or an interrupt.

    `results` are pairs of a path and its result.
    """
    lines = []
    for path, saved in results:
        body = vars(saved.details) if saved.details else saved.top
        lines += [f"DO NOT TRUST THE TIMES of {path}: {one}" for one in body["machine"]["doubts"]]
        if body["is_interrupted"]:
            lines.append(f"{path} was interrupted, and covers what was measured")
    return lines


def change_lines(found: ResultChanges) -> list[str]:
    """Return a table of all compared figures as lines, and lines that explain the table."""
    rows = [["", "A", "B", "change", "95 % interval", "from", "beyond noise"]]
    rows += [_row(change) for change in found.changes]
    used = {change.source.split(" ")[-1] for change in found.changes}
    lines = [format_table(rows), ""]
    lines += [text for name, text in _LEGEND.items() if name in used]
    if used - {""}:
        lines.append("one figure in 20 is beyond noise by chance")
    return lines


def _row(change: Change) -> list[str]:
    interval = ""
    if change.interval is not None:
        interval = " to ".join(f"{100 * (end - 1):+.1f} %" for end in change.interval)
    return [
        change.key,
        shown(change.before),
        shown(change.after),
        f"{100 * (change.ratio - 1):+.1f} %",
        interval,
        change.source,
        _WORDS[change.is_beyond_noise],
    ]


def as_json(found: ResultChanges) -> dict:
    """Return the comparison as JSON-compatible types."""
    changes = {
        one.key: {
            "before": one.before,
            "after": one.after,
            "ratio": one.ratio,
            "interval": one.interval,
            "interval_from": one.source,
            "is_beyond_noise": one.is_beyond_noise,
        }
        for one in found.changes
    }
    return {"settings": dict(found.settings), "changes": changes}
