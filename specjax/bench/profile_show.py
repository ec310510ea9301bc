"""`specjax profile show`: shows a profile's time per output token, by batch size and K."""

import argparse
import json

from specjax.bench.table import format_table
from specjax.host.speculation.profile import Comparison, Profile


def run(args: argparse.Namespace) -> int:
    """Run `specjax profile show`."""
    profile = Profile.read(args.profile)
    compared = profile.table(read_batch_sizes(args.batch_size, profile))
    if args.json:
        print(json.dumps(compared._asdict(), indent=2))
    else:
        print(describe(profile, compared))
    return 0


def read_batch_sizes(given: str | None, profile: Profile) -> list[int]:
    """Parse the batch sizes in `given`, like 1,4,16. If None, return the profile's batch sizes."""
    if given is None:
        return sorted(profile.step_ms)
    try:
        sizes = sorted({int(size) for size in given.split(",")})
    except ValueError as error:
        raise ValueError(f"--batch-size {given} must list integers, like 1,4,16") from error
    if sizes[0] < 1:
        raise ValueError(f"--batch-size {given} must list integers of at least 1")
    return sizes


def describe(profile: Profile, compared: Comparison) -> str:
    """Return a text with a table of the times in `compared`, and what `profile` was measured on."""
    header = ["batch", *(f"K={k}" for k in range(profile.max_drafts + 1)), "best"]
    rows, has_estimates = [], False
    for batch, row in compared.tpot_ms.items():
        best, timed = compared.best_k[batch], profile.step_ms.get(batch, {})
        starred = min((k for k in row if k in timed), key=lambda k: row[k], default=None)
        cells = [
            f"{'' if k in timed else '~'}{ms:.2f}{'*' if k == starred else ' '}"
            for k, ms in row.items()
        ]
        has_estimates |= any(k not in timed for k in row)
        rows.append([str(batch), *cells, f"{'' if best in timed else '~'}K={best}"])
    title = "ms per output token of a request, by batch size and K; * marks the best measured K"
    lines = [title, ""]
    lines += [format_table([header, *rows]), ""]
    if has_estimates:
        lines.append("~ is an estimate, interpolated between measured sizes or Ks")
    first, last = min(profile.step_ms), max(profile.step_ms)
    if any(not first <= batch <= last for batch in compared.tpot_ms):
        lines.append(f"profiled from {first} to {last}; other sizes show the nearest")
    lines.append(f"measured on: {_describe_measured(profile)}")
    return "\n".join(lines)


def _describe_measured(profile: Profile) -> str:
    if not profile.measured:
        return "unknown; the profile does not say"
    return ", ".join(f"{key} {_text(value)}" for key, value in profile.measured.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
