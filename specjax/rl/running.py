"""Tracks unfinished rollouts, and reads finished rollouts and scores from the engine."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specjax.host.sequence import Sequence as Sample
from specjax.outputs import TokenLogprobs
from specjax.rl.rollouts import Rollout, Score, Span
from specjax.sampling_params import SamplingParams
from specjax.text.completions import Completion


@dataclass(eq=False)
class Running:
    """A rollout that has not been returned to its caller yet."""

    sequence: Sample
    completion: Completion
    params: SamplingParams  # the user's parameters
    place: int  # index of its prompt among the prompts of the call
    prompt_index: int
    sample_index: int
    label: Hashable = None  # label of the call
    before: Rollout | None = None  # the aborted rollout that this one resumes
    spans: list[Span] = field(default_factory=list)  # tokens with a recorded weights version

    @property
    def request_id(self) -> Hashable:
        """The id of this sample's request."""
        return self.sequence.request.request_id

    def close_span(self, version: int) -> None:
        """Record that weights of `version` generated the tokens since the last call."""
        num_new = self.sequence.num_output - sum(span.num_tokens for span in self.spans)
        if num_new and self.spans and self.spans[-1].version == version:
            num_new += self.spans.pop().num_tokens
        if num_new:
            self.spans.append(Span(version, num_new))

    def rollout(self, version: int, *, has_raw: bool) -> Rollout:
        """Return the rollout, which must have ended.

        Args:
            version: the version of the weights that sampled the tokens after the last span.
            has_raw: whether the engine recorded raw log-probabilities.
        """
        self.close_span(version)
        sequence, before = self.sequence, self.before
        has_replay = sequence.index < len(sequence.request.replays)
        assert sequence.finish_reason is not None
        logprobs, raw = read_logprobs(sequence.logprobs, has_raw=has_raw)
        if before is not None:
            logprobs = np.concatenate([before.logprobs, logprobs])
            if raw is not None:
                earlier = before.raw_logprobs
                raw = None if earlier is None else np.concatenate([earlier, raw])
        return Rollout(
            prompt_token_ids=np.array(sequence.request.prompt_token_ids, np.int32),
            token_ids=np.array(sequence.output, np.int32),
            logprobs=logprobs,
            raw_logprobs=raw,
            versions=tuple(self.spans),
            finish_reason=sequence.finish_reason,
            text=self.completion.text(),
            params=self.params,
            seed=sequence.request.seeds[sequence.index],
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            error=sequence.error,
            reuses_noise=has_replay or (before is not None and before.reuses_noise),
        )


def read_logprobs(
    entries: Sequence[TokenLogprobs], *, has_raw: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the log-probabilities f32[n] and the raw log-probabilities f32[n] of n tokens.

    The raw log-probabilities are None unless `has_raw`.
    """
    found = [next(iter(entry.values())) for entry in entries]  # the token itself is first
    logprobs = np.array([one.logprob for one in found], np.float32)
    if not has_raw:
        return logprobs, None
    return logprobs, np.array([one.raw_logprob for one in found], np.float32)


def read_score(sequence: Sample, *, has_raw: bool) -> Score:
    """Return the score of a finished sequence."""
    entries = [entry for entry in sequence.prompt_logprobs[sequence.num_prompt_tokens :] if entry]
    logprobs, raw = read_logprobs(entries, has_raw=has_raw)
    if not sequence.features:
        return Score(logprobs, raw)
    num_rows = len(sequence.token_ids) - 1
    _, first = sequence.features[0]
    hidden = np.empty((num_rows, first.hidden.shape[1]), first.hidden.dtype)
    auxiliary = None
    if first.auxiliary is not None:
        auxiliary = np.empty((num_rows, first.auxiliary.shape[1]), first.auxiliary.dtype)
    # In execution order: rows recomputed after a change of weights overwrite the earlier rows.
    for start, features in sequence.features:
        rows = slice(start, start + len(features.hidden))
        hidden[rows] = features.hidden
        if auxiliary is not None:
            auxiliary[rows] = features.auxiliary
    return Score(logprobs, raw, hidden, auxiliary)
