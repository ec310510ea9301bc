"""The data set "custom": the user's own file of JSON objects, each with a prompt."""

from dataclasses import dataclass

from specjax.bench.datasets.example import Example, Row, RowSource, option, read_rows, user
from specjax.bench.datasets.questions import check_lengths

FIELDS = "messages", "prompt_token_ids", "prompt", "question", "turns"
_REMEDY = f"name a .jsonl whose rows have one of {', '.join(FIELDS)}"


@dataclass(frozen=True, kw_only=True)
class Custom:
    """A file whose rows have a conversation, token ids or a text.

    As in vLLM, the field "prompt" is a user's message. With --skip-chat-template it is the whole
    prompt. Optional fields are "output_tokens" and "category".
    """

    output_len: int = option(256, "tokens to generate, if the row has no output_tokens")

    def check(self) -> None:
        """See `Dataset`."""
        check_lengths(output_len=self.output_len)

    def examples(self, source: RowSource) -> list[Example]:
        """See `Dataset`."""
        return [self._read(row) for row in read_rows(source, _REMEDY)]

    def _read(self, row: Row) -> Example:
        given = [name for name in FIELDS if row.fields.get(name) is not None]
        if len(given) != 1:
            raise row.error(f"it must have one field of {', '.join(FIELDS)}; it has {given}")
        name, value = given[0], row.fields[given[0]]
        category = row.fields.get("category", "")
        if not isinstance(category, str):
            raise row.error(f"the field 'category' is {category!r}; it must be a text")
        length = row.count("output_tokens") or self.output_len
        if name == "prompt_token_ids":
            if not isinstance(value, list) or not value or any(type(t) is not int for t in value):
                raise row.error(f"the field {name!r} must be a list of token ids")
            return Example(token_ids=value, output_len=length, group=category)
        if name == "messages":
            if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
                raise row.error(f"the field {name!r} must be a list of messages")
            return Example(messages=value, output_len=length, group=category)
        if name == "turns":
            if not isinstance(value, list) or not value or not isinstance(value[0], str):
                raise row.error(f"the field {name!r} must be a list of texts")
            return Example(messages=user(value[0]), output_len=length, group=category)
        return Example(messages=user(row.text(name)), output_len=length, group=category)
