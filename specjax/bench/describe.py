"""Shows a result as text. The benchmarks `latency`, `throughput` and `serve` share this module."""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.bench.peers.peer import describe_outputs
from specjax.bench.provenance import line as environment_line
from specjax.bench.result import Details, Speculation
from specjax.bench.table import format_table

_WIDTH, _FIRST = 50, 40  # of vLLM's console
DOUBT = "DO NOT TRUST THESE TIMES"  # begins a line


def heading(text: str, fill: str = "-") -> str:
    """Return a heading, filled to the width of the headings of `vllm bench`."""
    return f"{f' {text} ' if fill == '=' else text:{fill}^{_WIDTH}}"


def row(name: str, value: float | int) -> str:
    """Return a row, aligned as in the output of `vllm bench`."""
    shown = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{name + ':':<{_FIRST}} {shown:<10}".rstrip()


def speculation_lines(found: Speculation | None) -> list[str]:
    """Return the section about speculation; empty if nothing was drafted."""
    if found is None or found.total is None:
        return []
    total = found.total
    lines = [
        heading("Speculative Decoding"),
        row("Acceptance rate (%)", 100 * total["acceptance_rate"]),
        row("Acceptance length", total["acceptance_length"]),
        row("Drafts", total["num_drafts"]),
        row("Draft tokens", total["num_draft_tokens"]),
        row("Accepted tokens", total["num_accepted"]),
        "Per-position acceptance (%):",
    ]
    rates = enumerate(total["rates_per_position"])
    lines += [row(f"  Position {i}", 100 * rate) for i, rate in rates]
    groups = {name: one for name, one in found.by_group.items() if name}
    lines += [row(f"Acceptance length, {n}", g["acceptance_length"]) for n, g in groups.items()]
    if len(found.by_source) > 1:
        sources = found.by_source.items()
        lines += [row(f"Acceptance length of {n}", one["acceptance_length"]) for n, one in sources]
    lines += [row(f"Rounds with K = {k}", count) for k, count in found.k_histogram.items()]
    lines += [row(f"Time per round with K = {k} (ms)", ms) for k, ms in found.ms_per_round.items()]
    lines += [
        row(f"Round with K = {k}, in plain steps", ratio)
        for k, ratio in found.round_over_plain.items()
    ]
    if found.synthetic_rates is not None:
        lines.append(
            f"drafts were accepted at the rates {list(found.synthetic_rates)}, not verified"
        )
    return lines


def step_lines(found: Speculation | None) -> list[str]:
    """Return rows with the mean times of an engine step; empty if none is known."""
    if found is None:
        return []
    named = {
        "Host per step (ms)": found.host_ms,
        "Waiting for the device per step (ms)": found.wait_ms,
        "Device per round, at most (ms)": found.device_ms,
    }
    return [row(name, value) for name, value in named.items() if value is not None]


def peer_lines(details: Details, shown: Mapping[str, str]) -> list[str]:
    """Return a table that compares this engine with other engines (peers).

    `shown` maps the key of each figure to its name in the table.
    """
    if not details.peers:
        return []
    first = details.peers[0]
    names = [key for key in shown if key in first.figures]
    header = ["", *(peer.name for peer in details.peers), *(f"x {p.name}" for p in details.peers)]
    rows = [
        [
            shown[key],
            *(f"{peer.figures[key]:.2f}" for peer in details.peers),
            *(f"{ratio:.2f}" if (ratio := peer.ratios.get(key)) else "-" for peer in details.peers),
        ]
        for key in names
    ]
    lines = [
        heading("Peers"),
        format_table([header, *rows]),
        "x: specjax over the peer; of times less than 1 is faster, of rates more than 1",
    ]
    return lines + [
        f"{p.name} {p.version or ''}".rstrip() + f": {describe_outputs(p)}" for p in details.peers
    ]


def lossless_line(found: Mapping[str, Any] | None) -> str | None:
    """Return a sentence that compares outputs with plain decoding; None if nothing was compared."""
    if found is None:
        return None
    wrong, ties = len(found["mismatches"]), len(found["near_ties"])
    if wrong:
        return f"NOT LOSSLESS: {wrong} outputs differ; the first: {found['mismatches'][0]}"
    tied = f"; {ties} outputs differ after two scores that are equal up to rounding" if ties else ""
    return (
        f"same tokens as plain decoding: yes, {found['num_outputs']} outputs, "
        f"{found['num_tokens']} tokens{tied}"
    )


def warm_up_line(found: Mapping[str, Any] | None) -> str | None:
    """Return a warning if the warm-up ended too early, else None."""
    if found is None or found["is_settled"]:
        return None
    return (
        f"the warm-up ended after {found['seconds']:.0f} s, before all programs were compiled that "
        "make runs faster; later runs may be faster"
    )


def closing_lines(details: Details, model: str) -> list[str]:
    """Return the last lines: model, prompts, device, versions, failures, and warnings."""
    data, doubts = details.dataset, details.machine["doubts"]
    prompts = f"{data['num_requests']} prompts of {data['path'] or data['name']}"
    if data["mean_prompt_len"] is not None:
        prompts += f", mean {data['mean_prompt_len']:.0f} tokens"
    template = "no chat template"
    if data["chat_template"] is not None:
        template = f"the chat template, thinking: {data['thinking']}"
    lines: Sequence[str | None] = [
        f"{DOUBT}: {' and '.join(doubts)}" if doubts else None,
        warm_up_line(details.warm_up),
        f"{details.num_compiles} programs were compiled while measuring; warm up with more"
        if details.num_compiles
        else None,
        lossless_line(details.lossless),
        "interrupted: the figures cover what was measured" if details.is_interrupted else None,
        *(f"{count} failed: {error}" for error, count in details.failures.items()),
        *data["notes"],
        f"{model}, {prompts}, {template}",
        environment_line(details.environment),
    ]
    return [one for one in lines if one is not None]
