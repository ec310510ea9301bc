"""Prompts of random tokens, with chosen lengths and shared prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass

from specjax.bench.datasets.example import Example, RowSource, option
from specjax.bench.datasets.questions import check_lengths


@dataclass(frozen=True, kw_only=True)
class RandomTokens:
    """Random tokens, for measuring times. Acceptance rates on such prompts mean nothing."""

    input_len: int = option(1024, "tokens of a prompt, without the prefix")
    output_len: int = option(128, "tokens to generate")
    range_ratio: float = option(0.0, "r: lengths are drawn from (1 - r) to (1 + r) times")
    prefix_len: int = option(0, "tokens that all prompts begin with")

    def check(self) -> None:
        """See `Dataset`."""
        check_lengths(input_len=self.input_len, output_len=self.output_len)
        check_lengths(0, prefix_len=self.prefix_len)
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"--random-range-ratio {self.range_ratio} must be in 0..1, without 1")

    def examples(self, source: RowSource) -> list[Example]:
        """See `Dataset`."""
        draw, ids = source.random, source.vocabulary()
        prefix = draw.choices(ids, k=self.prefix_len)

        def length(mean: int) -> int:
            most = int(mean * (1 + self.range_ratio))
            return draw.randint(max(1, round(mean * (1 - self.range_ratio))), most)

        return [
            Example(
                token_ids=[*prefix, *draw.choices(ids, k=length(self.input_len))],
                output_len=length(self.output_len),
            )
            for _ in range(source.count)
        ]


@dataclass(frozen=True, kw_only=True)
class PrefixRepetition:
    """Random tokens, in groups of prompts that share a prefix."""

    prefix_len: int = option(256, "tokens of a prefix")
    suffix_len: int = option(256, "tokens after the prefix, which differ")
    num_prefixes: int = option(10, "number of prefixes, used equally often")
    output_len: int = option(128, "tokens to generate")

    def check(self) -> None:
        """See `Dataset`."""
        check_lengths(num_prefixes=self.num_prefixes, output_len=self.output_len)
        check_lengths(prefix_len=self.prefix_len, suffix_len=self.suffix_len)

    def examples(self, source: RowSource) -> list[Example]:
        """See `Dataset`."""
        draw, ids = source.random, source.vocabulary()
        prefixes: Sequence[list[int]] = [
            draw.choices(ids, k=self.prefix_len) for _ in range(self.num_prefixes)
        ]
        return [
            Example(
                token_ids=[*prefixes[i % self.num_prefixes], *draw.choices(ids, k=self.suffix_len)],
                output_len=self.output_len,
                group=f"prefix {i % self.num_prefixes}",
            )
            for i in range(source.count)
        ]
