"""Turns the examples of a data set into the prompts that are sent to a model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from specjax.bench.datasets import DATASETS
from specjax.bench.datasets.example import Dataset, Example, RowSource
from specjax.checks import check_positive, check_seed
from specjax.text.tokenizer import ChatTokenizer

THINKING = "enable_thinking", "thinking", "reasoning_effort"  # variables of chat templates


@dataclass(frozen=True, kw_only=True)
class Query:
    """A prompt and the number of tokens to generate at most.

    Attributes:
        token_ids: the prompt; None without a tokenizer.
        text: the prompt as a text; None if the data set or the chat template gives the prompt as
            token ids.
        messages: the conversation, if the prompt comes from one.
        group, arrival: see `Example`.
    """

    index: int
    output_len: int
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    group: str = ""
    arrival: float | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """The choice of a data set, and how its prompts are made.

    Args:
        name: a key of `DATASETS`.
        dataset: the data set, with the options that are specific to it.
        input_len: the length of prompts of random tokens; None for the data set's default.
        output_len: the number of tokens to generate; None for the length that the data set gives.
        oversamples: whether rows are repeated if there are too few.
        applies_template: whether the chat template is applied to conversations.
        template_kwargs: variables of the chat template, such as enable_thinking.
    """

    name: str
    dataset: Dataset
    path: Path | None = None
    num_prompts: int
    seed: int = 0
    input_len: int | None = None
    output_len: int | None = None
    shuffles: bool = True
    oversamples: bool = True
    applies_template: bool = True
    template_kwargs: Mapping[str, Any]

    def __post_init__(self):
        check_positive(**{"--num-prompts": self.num_prompts})
        check_seed(**{"--seed": self.seed})
        if self.output_len is not None:
            check_positive(**{"--output-len": self.output_len})
        if self.input_len is not None and not hasattr(self.dataset, "input_len"):
            makers = [name for name, one in DATASETS.items() if hasattr(one, "input_len")]
            raise ValueError(
                f"--input-len {self.input_len} goes with --dataset-name {', '.join(makers)}; the "
                f"prompts of {self.name} have their own lengths"
            )
        self.chosen.check()

    @property
    def chosen(self) -> Dataset:
        """The data set; its prompts have the length `input_len` if that is not None."""
        given: Any = self.dataset
        return given if self.input_len is None else replace(given, input_len=self.input_len)


@dataclass(frozen=True, kw_only=True)
class Queries:
    """All prompts of a run, and how they were made."""

    settings: DatasetSettings
    queries: Sequence[Query]
    notes: Sequence[str]
    template: str | None  # the text of the chat template; None if it was not applied

    @cached_property
    def groups(self) -> Mapping[str, int]:
        """The number of prompts per group."""
        return dict(Counter(query.group for query in self.queries))

    def as_json(self) -> dict[str, Any]:
        """Return the part of a benchmark's JSON result that describes the data set."""
        settings = self.settings
        thinking = {k: v for k, v in settings.template_kwargs.items() if k in THINKING}
        lengths = [len(query.token_ids) for query in self.queries if query.token_ids is not None]
        return {
            "name": settings.name,
            "path": str(settings.path) if settings.path else None,
            "num_requests": len(self.queries),
            "groups": dict(self.groups),
            "mean_prompt_len": sum(lengths) / len(lengths) if lengths else None,
            "chat_template": self.template,
            "chat_template_kwargs": dict(settings.template_kwargs),
            "thinking": thinking or "the template's default",
            "seed": settings.seed,
            "notes": list(self.notes),
        }


def make_queries(settings: DatasetSettings, tokenizer: ChatTokenizer | None) -> Queries:
    """Read the data set, choose its rows, and make their prompts.

    Raises:
        ValueError: the file is missing or malformed, there are too few rows, or a prompt needs a
            tokenizer and there is none.
    """

    def needed() -> ChatTokenizer:
        if tokenizer is None:
            raise ValueError(
                f"--dataset-name {settings.name} needs the tokenizer; name it with --tokenizer"
            )
        return tokenizer

    source = RowSource(
        path=settings.path,
        count=settings.num_prompts,
        random=Random(settings.seed),
        vocabulary=lambda: _ordinary_ids(needed()),
        count_tokens=lambda text: len(needed().encode(text)),  # as vLLM counts
    )
    chosen = _choose(settings, source)
    uses_template = (
        settings.applies_template and tokenizer is not None and tokenizer.template is not None
    )
    if settings.template_kwargs and not uses_template and tokenizer is not None:
        raise ValueError("--chat-template-kwargs is given, but no chat template is applied")
    queries = []
    for i, example in enumerate(chosen):
        query = Query(
            index=i,
            output_len=settings.output_len or example.output_len or 128,
            messages=example.messages,
            group=example.group,
            arrival=example.arrival,
        )
        queries.append(replace(query, **_prompt(example, tokenizer, settings, uses_template)))
    template = tokenizer.template if tokenizer is not None and uses_template else None
    return Queries(settings=settings, queries=queries, notes=source.notes, template=template)


def _choose(settings: DatasetSettings, source: RowSource) -> list[Example]:
    examples = settings.chosen.examples(source)
    where = settings.path or f"--dataset-name {settings.name}"
    if not examples:
        raise ValueError(f"{where} has no rows to use")
    if settings.shuffles and examples[0].arrival is None:  # else ordered by time
        source.random.shuffle(examples)
    count, available = settings.num_prompts, len(examples)
    if count > available:
        if not settings.oversamples:
            raise ValueError(f"--num-prompts {count}: {where} has {available}; lower it")
        source.note(f"{where} has {available} rows, which are repeated for {count} requests")
    return [examples[i % available] for i in range(count)]


def _prompt(
    example: Example,
    tokenizer: ChatTokenizer | None,
    settings: DatasetSettings,
    uses_template: bool,
) -> dict[str, Any]:
    """Return the fields of a `Query` that hold its prompt."""
    if example.token_ids is not None:
        return {"token_ids": tuple(example.token_ids)}
    text = example.text
    if text is None:
        messages = list(example.messages or ())
        if tokenizer is not None and uses_template:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, **settings.template_kwargs
            )
            return {"token_ids": tuple(ids)}
        text = str(messages[-1]["content"])
    if tokenizer is None:
        return {"text": text}
    return {"text": text, "token_ids": tuple(tokenizer.encode(text))}


def _ordinary_ids(tokenizer: ChatTokenizer) -> list[int]:
    """Return the ids of all tokens that are not special."""
    inner = tokenizer.tokenizer
    special = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
    return [i for i in range(inner.get_vocab_size()) if i not in special]
