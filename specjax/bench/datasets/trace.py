"""Traces of real services: when requests arrived, and the lengths of prompts and outputs.

The texts are not published, so prompts have random tokens. Mooncake's traces also say which blocks
of tokens are the same in several prompts. The random prompts then share the same blocks.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from random import Random
from typing import Any, NamedTuple

from specjax.bench.datasets.example import Example, Row, RowSource, option, parse_rows, read_text
from specjax.bench.datasets.questions import check_lengths

BLOCK = 512  # tokens per block; Mooncake's "hash_ids" lists the ids of a prompt's blocks
_REMEDY = (
    "get AzureLLMInferenceTrace_conv.csv from github.com/Azure/AzurePublicDataset, BurstGPT_1.csv "
    "from github.com/HPMLL/BurstGPT, or conversation_trace.jsonl from "
    "github.com/kvcache-ai/Mooncake, FAST25-release/traces"
)


def _seconds_of_date(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


class Columns(NamedTuple):
    """The names of the fields in a kind of trace.

    `seconds` converts the text of the field `time` to seconds.
    """

    time: str
    seconds: Callable[[str], float]
    input_len: str
    output_len: str


COLUMNS = (
    Columns("TIMESTAMP", _seconds_of_date, "ContextTokens", "GeneratedTokens"),  # Azure
    Columns("Timestamp", float, "Request tokens", "Response tokens"),  # BurstGPT
    Columns("timestamp", lambda text: float(text) / 1e3, "input_length", "output_length"),
)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A file in CSV or JSON, with the fields of Azure's, BurstGPT's or Mooncake's traces.

    Unusable requests are left out. Of all others, the earliest --num-prompts requests are used.
    Mooncake's "timestamp" is in milliseconds.
    """

    speed: float = option(1.0, "2 halves the times between requests")
    max_total: int | None = option(None, "leave out requests with more tokens, answers included")

    def check(self) -> None:
        """See `Dataset`."""
        if not 0 < self.speed < float("inf"):
            raise ValueError(f"--trace-speed {self.speed:g} must be above 0; 1 is as recorded")
        if self.max_total is not None:
            check_lengths(2, max_total=self.max_total)

    def examples(self, source: RowSource) -> list[Example]:
        """See `Dataset`. Raise a ValueError, too, if fewer than `source.count` requests are left.

        A request is left out if it has no output tokens, or if its prompt and output together have
        more than `max_total` tokens.
        """
        found = [_read(row) for row in _rows(source)]
        answered = [one for one in found if one.output_len]
        most = self.max_total or float("inf")
        kept = [one for one in answered if one.input_len + one.output_len <= most]
        if len(answered) < len(found):
            source.note(f"{len(found) - len(answered)} requests without an answer are left out")
        if len(kept) < len(answered):
            source.note(f"{len(answered) - len(kept)} requests above {most} tokens are left out")
        kept.sort(key=lambda one: one.seconds)
        if len(kept) < source.count:
            raise ValueError(
                f"--num-prompts {source.count}: {source.path} has {len(kept)} requests to use; "
                "lower it"
            )
        ids = source.vocabulary()
        blocks: dict[int, list[int]] = {}
        return [
            Example(
                token_ids=_tokens(one, ids, blocks, source.random),
                output_len=one.output_len,
                arrival=(one.seconds - kept[0].seconds) / self.speed,
            )
            for one in kept[: source.count]
        ]


class _Request(NamedTuple):
    seconds: float
    input_len: int
    output_len: int
    blocks: Sequence[int]


def _rows(source: RowSource) -> Iterator[Row]:
    text = read_text(source, _REMEDY)
    path = source.path
    assert path is not None
    if text.lstrip()[:1] in ("{", "["):
        yield from parse_rows(path, text)
        return
    reader = csv.DictReader(text.splitlines(), strict=True)
    try:
        for fields in reader:
            yield Row(path, f"line {reader.line_num}", fields)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV: {error}") from None


def _read(row: Row) -> _Request:
    columns = next((one for one in COLUMNS if one.time in row.fields), None)
    if columns is None:
        known = ", ".join(map(str, row.fields))
        times = ", ".join(one.time for one in COLUMNS)
        raise row.error(f"none of the fields {times} is there; the row's fields: {known}")
    text = row.fields[columns.time]
    try:
        seconds = columns.seconds(str(text))
    except ValueError:
        seconds = float("nan")
    if not abs(seconds) < float("inf"):
        raise row.error(f"the field {columns.time!r} is {text!r}; it must be a time")
    blocks = row.fields.get("hash_ids") or []
    if not isinstance(blocks, list) or any(type(one) is not int for one in blocks):
        raise row.error(f"the field 'hash_ids' is {blocks!r}; it must be a list of integers")
    input_len = _count(row, columns.input_len, 1)
    return _Request(seconds, input_len, _count(row, columns.output_len, 0), blocks)


def _count(row: Row, name: str, least: int) -> int:
    value: Any = row.fields.get(name)
    try:
        count = int(str(value))
    except ValueError:
        count = -1
    if count < least:
        raise row.error(
            f"the field {name!r} is {value!r}; it must be an integer of at least {least}"
        )
    return count


def _tokens(
    one: _Request, ids: Sequence[int], blocks: dict[int, list[int]], random: Random
) -> list[int]:
    """Return random tokens as the prompt of `one`, a request of the trace.

    The prompt has the tokens of the request's blocks, then new random tokens. Blocks with the same
    id have the same tokens in all prompts. `blocks` maps the ids of earlier blocks to their tokens,
    and gets the new blocks.
    """
    tokens: list[int] = []
    for block in one.blocks:
        if block not in blocks:
            blocks[block] = random.choices(ids, k=BLOCK)
        tokens += blocks[block]
    tokens = tokens[: one.input_len]
    return tokens + random.choices(ids, k=one.input_len - len(tokens))
