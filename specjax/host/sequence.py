"""A request in residence: one of its samples, with a slot and pages of its own."""

from dataclasses import dataclass, field

from specjax.request import Matcher, Request, TextWatch, TokenLogprobs


@dataclass
class RowOutput:
    """What a step gave one sequence."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(eq=False)
class Sequence:
    """How far one sample of a request has come, and where it ends."""

    request: Request
    index: int  # of the sample
    slot: int
    pages: list[int]
    num_prefilled: int = 0
    was_planned: bool = False  # whether a step has been told of it
    num_in_flight: int = 0  # steps launched whose tokens have not come back
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    watch: TextWatch | None = None
    matcher: Matcher | None = None

    @classmethod
    def of(cls, request: Request, index: int, slot: int, pages: list[int]) -> "Sequence":
        """Sample `index` of a request, at its beginning."""
        watch = request.watch_text and request.watch_text()
        matcher = request.follow_grammar and request.follow_grammar()
        return cls(request, index, slot, pages, watch=watch, matcher=matcher)

    @property
    def is_prefilled(self) -> bool:
        """Whether every prompt token has been scheduled."""
        return self.num_prefilled == len(self.request.prompt_token_ids)

    @property
    def may_go_on(self) -> bool:
        """Whether the steps in flight might leave tokens to generate."""
        return len(self.output) + self.num_in_flight < self.request.max_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None

    def append(self, row: RowOutput) -> int:
        """Take what a step gave; how many of its tokens stand. Sets the finish reason."""
        if row.prompt_logprobs:
            self.prompt_logprobs += row.prompt_logprobs
        if not row.tokens:  # a chunk before a prompt's last
            return 0
        tokens = self._until_it_ends(row.tokens)
        self.output += tokens
        self.logprobs += (row.logprobs or [])[: len(tokens)]
        if not self.is_finished:
            self._finish_if_done(tokens[-1])
        return len(tokens)

    def _until_it_ends(self, tokens: list[int]) -> list[int]:
        """The tokens up to where the text or the grammar ends the output, which they follow."""
        for num_tokens, token in enumerate(tokens, start=1):
            if self.matcher is not None:
                self.matcher.accept([token])
            if self.watch is not None and self.watch.append([token]):
                self.finish_reason, self.stop_reason = "stop", self.watch.stop_reason
                return tokens[:num_tokens]
            if self.matcher is not None and self.matcher.is_finished:
                return tokens[:num_tokens]
        return tokens

    def _finish_if_done(self, last: int) -> None:
        if last in self.request.stop_ids:
            self.finish_reason = "stop"
            self.stop_reason = last if last in self.request.params.stop_token_ids else None
        elif self.matcher is not None and self.matcher.is_finished:
            self.finish_reason = "stop"
        elif len(self.output) >= self.request.max_tokens:
            self.finish_reason = "length"
