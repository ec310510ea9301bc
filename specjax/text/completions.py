"""Builds the outputs that users see, of finished and of unfinished requests."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from specjax.host.request import Request, TextWatch
from specjax.host.sequence import Sequence
from specjax.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from specjax.sampling_params import RequestOutputKind
from specjax.text.detokenizer import StopStrings, decode_after, prompt_context
from specjax.text.tokenizer import MAX_TOKENS_PER_CHARACTER, ChatTokenizer


@dataclass
class Completion:
    """One sample as its user sees it. While the sample grows, only its new tokens are decoded.

    The text of a sample is the text that its tokens add to the prompt. A stop token (including the
    end of sequence) is shown only with `include_stop_str_in_output`. If the stop token is a special
    token, `skip_special_tokens` must also be False.
    """

    sequence: Sequence
    tokenizer: ChatTokenizer | None
    num_shown: int = 0  # number of tokens that have been shown
    is_complete: bool = False  # whether the sample's end has been shown
    _text: TextWatch | None = None
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _error: Exception | None = None  # the error that ended decoding; the text is then None

    def __post_init__(self):
        if self.tokenizer is not None:
            skips = self.sequence.request.params.skip_special_tokens
            self.tokenizer = self.tokenizer.for_outputs(skip_special_tokens=skips)

    @property
    def has_grown(self) -> bool:
        """Whether any tokens, or the end of the sample, have not been shown yet."""
        sequence = self.sequence
        return sequence.num_output > self.num_shown or (
            sequence.is_finished and not self.is_complete
        )

    def output(self) -> CompletionOutput:
        """Return the output so far, and record that the user has seen its tokens."""
        sequence = self.sequence
        token_ids, params = sequence.output, sequence.request.params
        text = self.text()
        self.num_shown, self.is_complete = len(token_ids), sequence.is_finished
        logprobs = total = None
        if params.logprobs is not None:
            for i in range(len(self._logprobs), len(token_ids)):
                entry = with_text(sequence.logprobs[i], self.tokenizer, _before(token_ids, i))
                self._logprobs.append(entry)
            logprobs = list(self._logprobs)
            pairs = zip(token_ids, logprobs, strict=True)
            total = sum(entry[token].logprob for token, entry in pairs)
        return CompletionOutput(
            index=sequence.index,
            token_ids=token_ids,
            text=text,
            cumulative_logprob=total,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error or self._error,
            rounds=bytes(sequence.rounds),
        )

    def text(self) -> str | None:
        """Return the text so far.

        Return None without a tokenizer, with detokenize=False, or after an error in decoding.
        """
        sequence = self.sequence
        if self.tokenizer is None or not sequence.request.params.detokenize or self._error:
            return None
        try:
            return self._read(self.tokenizer, sequence.output)
        except Exception as error:  # the tokens are still returned
            self._error = error
            return None

    def _read(self, tokenizer: ChatTokenizer, token_ids: list[int]) -> str:
        watch = self.sequence.watch
        has_stopped = isinstance(self.sequence.stop_reason, str)
        if watch is not None and (has_stopped or not self.sequence.is_finished):
            return watch.stable
        prompt = self.sequence.request.prompt_token_ids
        if self.sequence.is_finished:
            shown = token_ids[: len(token_ids) - self.sequence.hides_last]
            return decode_after(tokenizer, prompt_context(tokenizer, prompt), shown)
        if self._text is None:
            self._text = StopStrings(tokenizer, (), context=prompt_context(tokenizer, prompt))
        self._text.append(token_ids[self.num_shown :])
        return self._text.stable


@dataclass(frozen=True)
class Outputs:
    """A request and its samples, in the form that users see."""

    request: Request
    completions: SequenceOf[Completion]
    prompt: str | None
    tokenizer: ChatTokenizer | None

    @classmethod
    def of(
        cls,
        request: Request,
        samples: SequenceOf[Sequence],
        prompt: str | None,
        tokenizer: ChatTokenizer | None,
    ) -> "Outputs":
        """Return the outputs of `samples`. `prompt` is the text that the user gave, or None."""
        return cls(request, [Completion(s, tokenizer) for s in samples], prompt, tokenizer)

    @cached_property
    def _prompt_token_ids(self) -> list[int]:
        return list(self.request.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(completion.sequence.is_finished for completion in self.completions)

    @property
    def has_grown(self) -> bool:
        """Whether any sample has grown since it was last shown."""
        return any(completion.has_grown for completion in self.completions)

    def output(self) -> RequestOutput:
        """Return the outputs of all samples so far, and record that the user has seen them."""
        request = self.request
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None:
            found = self.completions[0].sequence.prompt_logprobs
            tokens = request.prompt_token_ids
            prompt_logprobs = [
                entry and with_text(entry, self.tokenizer, _before(tokens, i))
                for i, entry in enumerate(found)
            ]
        return RequestOutput(
            request.request_id,
            self.prompt,
            self._prompt_token_ids,
            prompt_logprobs,
            [completion.output() for completion in self.completions],
            finished=self.is_finished,
            metrics=self._metrics(),
            num_cached_tokens=self.completions[0].sequence.num_cached_tokens,
        )

    def _metrics(self) -> RequestMetrics:
        samples = [completion.sequence for completion in self.completions]
        first = [s.first_token_ts for s in samples if s.first_token_ts is not None]
        last = [s.last_token_ts for s in samples if s.last_token_ts is not None]
        return RequestMetrics(
            sum(sample.num_output for sample in samples),
            samples[0].queued_ts,
            samples[0].scheduled_ts,
            min(first, default=None),
            max(last, default=None),
            [*chain.from_iterable(map(_rounds_of, samples))] if self.is_finished else (),
        )


def _rounds_of(sample: Sequence) -> Iterator[tuple[int, int]]:
    pairs = zip(sample.rounds[::2], sample.rounds[1::2], strict=True)
    return (pair for pair in pairs if pair[0])


class Shown:
    """Selects the part of a growing output that its user gets next.

    `kind` says which part: everything so far, only the new tokens, or nothing until the output is
    complete. `before` is an unfinished output that the user already has, or None.
    """

    def __init__(self, kind: RequestOutputKind, before: CompletionOutput | None = None):
        self._kind = kind
        self._before = {} if before is None else {before.index: before}

    def is_due(self, outputs: Outputs) -> bool:
        """Return whether to return `outputs`, or a part of them, to the user now."""
        is_last = outputs.is_finished or self._kind is not RequestOutputKind.FINAL_ONLY
        return outputs.has_grown and is_last

    def of(self, output: RequestOutput) -> RequestOutput | None:
        """Return the part of `output` that the user gets now; None if the user gets nothing.

        `output` is the whole output so far.
        """
        if self._kind is RequestOutputKind.CUMULATIVE:
            return output
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return output if output.finished else None
        parts = [self._added(one) for one in output.outputs]
        return replace(output, outputs=[part for part in parts if part is not None])

    def _added(self, now: CompletionOutput) -> CompletionOutput | None:
        """Return a sample's new part since the last call; None if the sample has not changed.

        `now` is the whole output of the sample so far.
        """
        before = self._before.get(now.index)
        self._before[now.index] = now
        if before is None:
            return now
        num_tokens = len(before.token_ids)
        if len(now.token_ids) == num_tokens and now.finish_reason == before.finish_reason:
            return None
        return replace(
            now,
            token_ids=now.token_ids[num_tokens:],
            text=None if now.text is None else now.text[len(before.text or "") :],
            logprobs=None if now.logprobs is None else now.logprobs[num_tokens:],
            rounds=now.rounds[len(before.rounds) :],
        )


def samples_of(started: SequenceOf[Outputs]) -> list[Sequence]:
    """Return the samples of the requests `started`, in the order of the requests."""
    return [completion.sequence for one in started for completion in one.completions]


class Growing:
    """The requests of a stream that have not yet returned their last output."""

    def __init__(self, started: SequenceOf[Outputs]):
        self._left = [(one, Shown(one.request.params.output_kind)) for one in started]

    def __len__(self) -> int:
        return len(self._left)

    @property
    def is_due(self) -> bool:
        """Whether any request has outputs to return to the user now."""
        return any(shown.is_due(one) for one, shown in self._left)

    def take(self) -> list[RequestOutput]:
        """Return the outputs that are due now."""
        due = [shown.of(one.output()) for one, shown in self._left if shown.is_due(one)]
        self._left = [(one, shown) for one, shown in self._left if not one.is_finished]
        return [output for output in due if output is not None]


def with_text(
    entry: TokenLogprobs, tokenizer: ChatTokenizer | None, before: SequenceOf[int]
) -> TokenLogprobs:
    """Return the log-probabilities `entry` with the text of each token.

    `before` are the tokens before the position of `entry`.
    """
    if tokenizer is None:
        return entry
    return {
        token: logprob._replace(decoded_token=tokenizer.decode_token(token, before))
        for token, logprob in entry.items()
    }


def _before(tokens: SequenceOf[int], end: int) -> SequenceOf[int]:
    """Return the tokens before index `end` that could form one character with token `end`."""
    return tokens[max(0, end - MAX_TOKENS_PER_CHARACTER) : end]
