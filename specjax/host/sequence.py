"""One sample of a request: its tokens and its other outputs."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

from specjax.host.prefix_cache import PageKey
from specjax.host.request import Matcher, Request, TextWatch
from specjax.host.residency import Residency
from specjax.outputs import TokenLogprobs

NO_LIMIT = 2**30  # more drafts than any round has


@dataclass(slots=True)
class RowOutput:
    """The output of a round or a chunk for one sequence."""

    tokens: list[int]
    num_drafts: int = 0  # number of drafts that could have been accepted
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    start: int = 0  # the chunk's first position; prompt_logprobs begin at the next position


@dataclass(eq=False)
class Sequence:
    """One sample of a request, from the request's arrival to the sample's end.

    While the sample is resident, it has a `residency`. A sample without a residency has not started
    yet, was preempted and will recompute its tokens, or has finished. Rounds in flight are counted
    here and not in the residency, because a sample may be preempted while they run.
    """

    request: Request
    index: int  # number of the sample within its request
    arrival: int  # number of the request in the order of arrival
    token_ids: list[int] = field(default_factory=list)  # tokens of the prompt and the output
    keys: list[PageKey] = field(default_factory=list)  # keys of its pages, computed as needed
    residency: Residency | None = None
    num_cached_tokens: int | None = None  # number found in the cache at the first admission
    queued_ts: float = field(default_factory=time.monotonic)  # in seconds, like the next three
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_in_flight: int = 0  # rounds, and chunks that sample, in flight; each gives a token or more
    max_tokens_in_flight: int = 0  # the maximum number of tokens that they can give together
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    # Two bytes for each round that gave tokens: its numbers of drafts and of accepted drafts.
    rounds: bytearray = field(default_factory=bytearray)
    features: list[Any] = field(default_factory=list)  # (start, features) per chunk, if exported
    watch: TextWatch | None = None
    matcher: Matcher | None = None
    # Properties of the request, stored because every step reads them:
    rank: tuple[int, int, int] = field(init=False)  # sort key, lowest first
    num_prompt_tokens: int = field(init=False)
    max_length: int = field(init=False)  # maximum number of tokens, including the prompt
    draft_limit: int = field(init=False)  # maximum number of drafts in a round

    def __post_init__(self):
        request, limit = self.request, self.request.params.num_speculative_tokens
        self.arrive(self.arrival)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_length = request.max_length
        self.draft_limit = NO_LIMIT if limit is None else limit

    @classmethod
    def of(cls, request: Request, index: int, arrival: int) -> "Sequence":
        """Return sample `index` of a new request."""
        known = [*request.prompt_token_ids, *request.output_token_ids]
        watch = request.watch_text and request.watch_text()
        matcher = request.follow_grammar and request.follow_grammar()
        if watch is not None and request.output_token_ids:
            watch.append(request.output_token_ids)
        if matcher is not None and request.output_token_ids:
            matcher.accept(request.output_token_ids)
        sequence = cls(request, index, arrival, known, watch=watch, matcher=matcher)
        sequence.prompt_logprobs = [None] * len(sequence.reported)
        return sequence

    def arrive(self, arrival: int) -> None:
        """Set `arrival`, the request's number in the order of arrival, and the resulting rank."""
        self.arrival, self.rank = arrival, (self.request.priority, arrival, self.index)

    def __lt__(self, other: "Sequence") -> bool:
        return self.rank < other.rank

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reported(self) -> list[int]:
        """The tokens whose log-probabilities prefill chunks can report.

        These are the prompt's tokens. If the request only scores a given output, they are the
        tokens of the prompt and of the output.
        """
        return (
            self.token_ids if self.request.is_scored else self.token_ids[: self.num_prompt_tokens]
        )

    @property
    def max_found(self) -> int:
        """Maximum number of tokens to take from the prefix cache.

        Tokens whose log-probabilities or hidden states are wanted are never taken from the cache.
        """
        request = self.request
        if request.params.prompt_logprobs is not None or request.exports_features:
            return 0
        return self.num_prompt_tokens - 1 if request.is_scored else len(self.token_ids)

    @property
    def min_length(self) -> int:
        """The total number of tokens if each round or chunk in flight gives only one token."""
        return len(self.token_ids) + self.num_in_flight

    def max_drafts(self, k: int, length: int) -> int:
        """Return how many of `k` drafts can become part of the output.

        The round follows the first `length` tokens, which include the prompt. The sequence's limits
        on drafts and on tokens may allow fewer drafts than `k`.
        """
        return max(0, min(k, self.draft_limit, self.max_length - length - 1))

    def num_usable(self, k: int, num_kept: int) -> int:
        """Return how many drafts of a round were usable, after its `num_kept` tokens were appended.

        A draft is usable if it could become part of the output. If the drafter found fewer than `k`
        drafts, the missing drafts count as usable.
        """
        if self.is_finished:  # drafts after the end are not usable
            return num_kept - 1
        return self.max_drafts(k, len(self.token_ids) - num_kept)

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None

    @property
    def hides_last(self) -> bool:
        """Whether the output ended with a token that is not part of its text."""
        return self.finish_reason == "stop" and self._hides(self.token_ids[-1])

    def _hides(self, token: int) -> bool:
        request = self.request
        return token in request.stop_ids and not request.params.include_stop_str_in_output

    def admit(self, residency: Residency) -> None:
        """Set the residency. At the first admission, set `scheduled_ts` and `num_cached_tokens`."""
        self.residency = residency
        if self.scheduled_ts is None:
            self.num_cached_tokens, self.scheduled_ts = residency.num_computed, time.monotonic()

    def fail(self, error: Exception) -> None:
        """Set an error, which ends only this sequence."""
        self.finish_reason, self.error = "error", error

    def append(self, row: RowOutput) -> int:
        """Append the output of a step, and return the number of tokens kept.

        If the output ends, the finish reason is set. An exception from the grammar or from the
        search for stop strings ends only this sequence.
        """
        if self.error is not None:  # set since the last step
            self.fail(self.error)
            return 0
        if row.prompt_logprobs:
            end = row.start + 1 + len(row.prompt_logprobs)
            self.prompt_logprobs[row.start + 1 : end] = row.prompt_logprobs
            if self.request.is_scored and end == len(self.token_ids):
                self.finish_reason = "length"
        if not row.tokens:  # a chunk that does not end a prompt
            return 0
        tokens = row.tokens
        if tokens[-1] < 0:
            return self._end_without_token(row)
        if self.matcher is not None or self.watch is not None:
            tokens = self._until_it_ends(tokens)
        self.token_ids += tokens
        self.last_token_ts = time.monotonic()
        if self.first_token_ts is None:
            self.first_token_ts = self.last_token_ts
        if tokens:
            rounds = self.rounds
            rounds.append(row.num_drafts)
            rounds.append(len(tokens) - 1)
        if row.logprobs:
            self.logprobs += row.logprobs[: len(tokens)]
        if self.finish_reason is None:
            last = tokens[-1]
            if last in self.request.stop_ids:
                self.finish_reason = "stop"
                is_users = last in (self.request.params.stop_token_ids or ())
                self.stop_reason = last if is_users else None
            elif self.matcher is not None and self.matcher.is_finished:
                self.finish_reason = "stop"
                if self.num_output < self.request.params.min_tokens:
                    self.fail(self._no_token_left())
            elif len(self.token_ids) >= self.max_length:
                self.finish_reason = "length"
        return len(tokens)

    def _end_without_token(self, row: RowOutput) -> int:
        """Append a row without its last token, which is -1, and return the number of tokens kept.

        The token -1 means that the device found no token to choose. The sequence fails, unless the
        row's earlier tokens end the output.
        """
        num_kept = self.append(replace(row, tokens=row.tokens[:-1]))
        if self.finish_reason is None:
            self.fail(self._no_token_left())
        return num_kept

    def _no_token_left(self) -> Exception:
        """Return an error that says why the output cannot go on."""
        where = f"no token can follow the {self.num_output} tokens of the output"
        constraints = self.request.constraints
        if not constraints:
            return RuntimeError(f"{where}: the model's logits are NaN, or all -inf")
        reason = self.matcher and self.matcher.dead_end
        why = f"structured_outputs: {reason}" if reason else f"all are ruled out by {constraints}"
        return ValueError(f"{where}: {why}; relax one, or check that no logits are NaN")

    def _until_it_ends(self, tokens: list[int]) -> list[int]:
        """Return the tokens up to the token at which a stop text or the grammar ends the output."""
        for num_tokens, token in enumerate(tokens, start=1):
            try:
                if self.matcher is not None:
                    self.matcher.accept([token])
                watch = None if self._hides(token) else self.watch
                if watch is not None and watch.append([token]):
                    self.finish_reason, self.stop_reason = "stop", watch.stop_reason
                    return tokens[:num_tokens]
            except Exception as error:  # a user's tokenizer or grammar may raise any
                self.fail(error)
                return tokens[: num_tokens - 1]
            if self.matcher is not None and self.matcher.is_finished:
                return tokens[:num_tokens]
        return tokens
