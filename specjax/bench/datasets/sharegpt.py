"""ShareGPT: conversations, whose first message is the prompt.

The length of the second message, the answer, is the number of tokens to generate.
"""

from dataclasses import dataclass

from specjax.bench.datasets.example import Example, Row, RowSource, option, read_rows, user
from specjax.bench.datasets.questions import check_lengths

_REMEDY = (
    "get ShareGPT_V3_unfiltered_cleaned_split.json from "
    "huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered"
)
# vLLM's limits, so that both tools use the same conversations.
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048


@dataclass(frozen=True, kw_only=True)
class ShareGPT:
    """A file of conversations, whose messages have a "value".

    Conversations with fewer than two messages, and very short or long conversations, are left out.
    """

    output_len: int | None = option(None, "tokens to generate; default: the answer's")

    def check(self) -> None:
        """See `Dataset`."""
        if self.output_len is not None:
            check_lengths(output_len=self.output_len)

    def examples(self, source: RowSource) -> list[Example]:
        """See `Dataset`."""
        rows = list(read_rows(source, _REMEDY))
        source.random.shuffle(rows)  # tokenize only as many as are needed
        found: list[Example] = []
        num_left_out = 0
        for row in rows:
            example = self._read(row, source)
            if example is None:
                num_left_out += 1
                continue
            found.append(example)
            if len(found) == source.count:
                break
        if num_left_out:
            source.note(
                f"{num_left_out} of {num_left_out + len(found)} conversations are left out: fewer "
                f"than 2 messages, below {MIN_TOKENS} tokens, a prompt above {MAX_PROMPT}, or a "
                f"total above {MAX_TOTAL}"
            )
        return found

    def _read(self, row: Row, source: RowSource) -> Example | None:
        """Return the example of a conversation, or None if it is left out."""
        turns = _turns(row)
        if len(turns) < 2:
            return None
        prompt, answer = (source.count_tokens(turn) for turn in turns[:2])
        length = self.output_len or answer
        is_long = prompt > MAX_PROMPT or prompt + length > MAX_TOTAL
        if is_long or min(prompt, length) < MIN_TOKENS:
            return None
        return Example(messages=user(turns[0]), output_len=length)


def _turns(row: Row) -> list[str]:
    turns = row.fields.get("conversations", row.fields.get("conversation"))
    if not isinstance(turns, list):
        raise row.error("the field 'conversations' must be a list")
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise row.error("each of 'conversations' must have a text 'value'")
    return [turn["value"] for turn in turns]
