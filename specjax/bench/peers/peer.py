"""Compares a result with the result of a peer, another engine, on the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from specjax.bench.result import Peer
from specjax.bench.traffic.record import Record


@dataclass(frozen=True, kw_only=True)
class Work:
    """The requests that a peer, another engine, runs for a comparison.

    Attributes:
        model: the checkpoint's folder or hub id.
        prompts: token ids.
        output_lens: tokens to generate at most, per prompt.
        batch_size: maximum number of prompts that run at a time.
        dtype: "float32" or "bfloat16".
        sampling: fields of `SamplingParams`.
        stop_ids: ids that end an output, unless the sampling ignores them.
    """

    model: str
    prompts: Sequence[Sequence[int]]
    output_lens: Sequence[int]
    batch_size: int
    dtype: str
    sampling: Mapping[str, Any]
    stop_ids: Sequence[int]


def ratios(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Return each number in `own`, divided by the number under the same key in `theirs`.

    A key is left out if its value in `theirs` is missing, not a number, or 0.
    """
    found = {}
    for name, value in own.items():
        other = theirs.get(name)
        numbers = isinstance(value, int | float) and isinstance(other, int | float)
        if numbers and not isinstance(value, bool) and other:
            found[name] = value / other
    return found


def compare_outputs(own: Sequence[Record], theirs: Sequence[Record]) -> dict[str, Any] | None:
    """Compare the outputs of the requests that both engines completed.

    Token ids are compared, or texts if token ids are missing; "compared" says which.
    "first_differences" has, for each pair of outputs that differ, the position of the first
    different token or character. Return None if no request was completed by both.
    """
    others = {record.index: record for record in theirs if record.error is None}
    pairs = [(one, others[one.index]) for one in own if one.error is None and one.index in others]
    if not pairs:
        return None
    has_ids = all(one.token_ids and other.token_ids for one, other in pairs)
    found = [
        (one.token_ids, other.token_ids) if has_ids else (one.text, other.text)
        for one, other in pairs
    ]
    return {
        "compared": "token_ids" if has_ids else "text",
        "num_compared": len(found),
        "num_same": sum(one == other for one, other in found),
        "first_differences": [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*one, strict=False)))
            for one in found
            if one[0] != one[1]
        ],
    }


def as_peer(
    name: str,
    version: str | None,
    *,
    own: Mapping[str, Any],
    figures: Mapping[str, Any],
    outputs: dict[str, Any] | None,
) -> Peer:
    """Return the comparison of another engine's `figures` with this engine's figures, `own`."""
    return Peer(
        name=name,
        version=version,
        figures=dict(figures),
        ratios=ratios(own, figures),
        outputs=outputs,
    )


def describe_outputs(peer: Peer) -> str:
    """Return a phrase that says how many outputs of another engine equal this engine's."""
    found = peer.outputs
    if found is None:
        return "outputs not compared"
    same, total = found["num_same"], found["num_compared"]
    if same == total:
        return f"all {total} outputs equal"
    first = min(found["first_differences"])
    unit = "token" if found["compared"] == "token_ids" else "character"
    return f"{same} of {total} outputs equal; the first difference is at {unit} {first}"
