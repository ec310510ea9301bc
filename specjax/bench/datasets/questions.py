"""Data sets with a question per row. They differ only in the names of files and fields."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specjax.bench.datasets.example import Example, Row, RowSource, option, read_rows, user

SHIPPED = Path(__file__).parents[1] / "prompts.jsonl"


def message(field: str) -> Callable[[Row], Example]:
    """Return a function that reads a user's message from the field `field` of a row."""
    return lambda row: Example(messages=user(row.text(field)))


def completion(field: str) -> Callable[[Row], Example]:
    """Return a function that reads a whole prompt from the field `field` of a row."""
    return lambda row: Example(text=row.text(field))


def first_turn(row: Row) -> Example:
    """Read the first turn of an MT-Bench or Spec-Bench row, from the field "turns" or "prompt"."""
    name = "turns" if "turns" in row.fields else "prompt"
    turns = row.fields.get(name)
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise row.error("the field 'turns' must be a list of texts, of which the first is used")
    category = row.fields.get("category", "")
    if not isinstance(category, str):
        raise row.error(f"the field 'category' is {category!r}; it must be a text")
    return Example(messages=user(turns[0]), group=category)


@dataclass(frozen=True, kw_only=True)
class Questions:
    """A file with a question per row.

    Args:
        read: a function that makes the example of a row.
        remedy: where to get the file; the end of messages about a missing or malformed file.
        shipped: the file to use without --dataset-path; None if the user must give one.
        output_len: see `Example`.
    """

    read: Callable[[Row], Example]
    remedy: str
    shipped: Path | None = None
    output_len: int = option(256, "tokens to generate")

    def check(self) -> None:
        """See `Dataset`."""
        check_lengths(output_len=self.output_len)

    def examples(self, source: RowSource) -> list[Example]:
        """See `Dataset`."""
        if source.path is None and self.shipped is not None:
            source = replace(source, path=self.shipped)
        rows = read_rows(source, self.remedy)
        return [replace(self.read(row), output_len=self.output_len) for row in rows]


@dataclass(frozen=True, kw_only=True)
class Categories(Questions):
    """A file with questions in several categories. The option `category` selects one of them."""

    category: str = option("", "use only the questions of this category")

    def examples(self, source: RowSource) -> list[Example]:
        """See `Dataset`. Raise a ValueError, too, if no question has the category."""
        found = super().examples(source)
        if not self.category:
            return found
        known = sorted({one.group for one in found})
        if self.category not in known:
            raise ValueError(f"category {self.category!r} is not in the file; it has {known}")
        kept = [one for one in found if one.group == self.category]
        source.note(f"{len(found) - len(kept)} rows of other categories are left out")
        return kept


def check_lengths(minimum: int = 1, **lengths: int) -> None:
    """Raise a ValueError if an option of a data set is below `minimum`.

    `lengths` maps the names of options to their values.
    """
    for name, value in lengths.items():
        if value < minimum:
            flag = name.replace("_", "-")
            raise ValueError(f"the data set's option {flag} {value} must be at least {minimum}")
