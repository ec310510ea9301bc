"""Joins the outputs of several workers that run the same request one after the other."""

from collections.abc import Sequence
from dataclasses import replace

from specjax.outputs import CompletionOutput, RequestOutput
from specjax.sampling_params import RequestOutputKind, SamplingParams


class Progress:
    """The output of a request so far. It joins workers' outputs, which have only new tokens.

    If the worker of a request dies, another worker runs the request. A request with one sample and
    without prompt log-probabilities continues after its last token. Other requests start again, and
    must get the same tokens as before.

    Attributes:
        params: the parameters with which workers run the request.
        output: the output so far; None before the first token.
    """

    def __init__(self, params: SamplingParams):
        is_final = params.output_kind is RequestOutputKind.FINAL_ONLY
        kind = params.output_kind if is_final else RequestOutputKind.DELTA
        self.params = replace(params, output_kind=kind)
        self.output: RequestOutput | None = None
        self._running: RequestOutput | None = None  # the output of the worker that runs it
        self._can_continue = params.n == 1 and params.prompt_logprobs is None

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete."""
        return self.output is not None and self.output.finished

    def begin(self) -> CompletionOutput | None:
        """Prepare for a worker that begins to run the request.

        Return the sample that the worker continues, or None if it starts from the prompt.
        """
        self._running = self.output if self._can_continue else None
        return None if self._running is None else self._running.outputs[0]

    def add(self, added: RequestOutput) -> RequestOutput | None:
        """Add an output that a worker sent.

        Return the whole output if it has grown. Otherwise, return None.

        Raises:
            RuntimeError: a worker started from the prompt, and gave other tokens than before.
        """
        self._running = now = _joined(self._running, added)
        if self.output is not None:
            pairs = list(zip(now.outputs, self.output.outputs, strict=False))
            if not all(_agree(one.token_ids, other.token_ids) for one, other in pairs):
                raise RuntimeError(
                    "a worker died, and another gave other tokens than those already shown: its "
                    "weights are newer, or its batches round differently"
                )
            are_behind = (len(one.token_ids) < len(other.token_ids) for one, other in pairs)
            if len(now.outputs) < len(self.output.outputs) or any(are_behind):
                return None
        self.output = now
        return now


def _joined(before: RequestOutput | None, added: RequestOutput) -> RequestOutput:
    """Return the output `before` with the new tokens of `added`."""
    samples = {} if before is None else {one.index: one for one in before.outputs}
    for one in added.outputs:
        known = samples.get(one.index)
        samples[one.index] = one if known is None else _appended(known, one)
    return replace(added, outputs=[samples[index] for index in sorted(samples)])


def _appended(before: CompletionOutput, added: CompletionOutput) -> CompletionOutput:
    text, logprobs = added.text, added.logprobs
    return replace(
        added,
        token_ids=before.token_ids + added.token_ids,
        text=None if text is None else (before.text or "") + text,
        logprobs=None if logprobs is None else (before.logprobs or []) + logprobs,
    )


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether the shorter of two sequences is a prefix of the other."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]
