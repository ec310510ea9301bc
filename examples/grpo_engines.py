"""Three engines with the same weights for `grpo_arithmetic.py`: two for rollouts, and a probe."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from arithmetic import MAX_TOKENS, Question
from grpo import rewards

from specjax import SamplingParams
from specjax.rl import RolloutBatch, RolloutEngine

TARGET, DRAFTER = "demo-llama", "demo-llama-eagle3"
PROBE_K = 3
# Few requests, so that a step on two cores is bound by reading weights, as on a GPU.
MAX_NUM_SEQS = 4
PAGE_SIZE = 4  # small, so that samples share most pages of a prompt of 15 tokens
# Every shape is compiled for three engines, one of them with every K. Prompts are short, so one
# shape of each kind is enough.
SHAPES = {
    "decode_batches": (MAX_NUM_SEQS,),
    "prefill_shapes": ((MAX_NUM_SEQS, 16),),
    "max_num_batched_tokens": MAX_NUM_SEQS * 16,
}
TOLERANCE = 1e-4  # for log-probabilities; programs of different shapes round differently


class Moment(NamedTuple):
    """The probe's measurements on the held-out questions."""

    when: str
    acceptance_length: float  # with PROBE_K drafts, at temperature 1
    sampled_accuracy: float  # at temperature 1
    greedy_accuracy: float


class Rollouts(NamedTuple):
    """Answers on which two engines agree."""

    answers: RolloutBatch
    speculative_seconds: float
    plain_seconds: float
    logprob_difference: float  # largest difference between the engines


@dataclass(frozen=True)
class Engines:
    """Three engines that serve the same policy; see `grpo_arithmetic`."""

    speculative: RolloutEngine
    plain: RolloutEngine
    probe: RolloutEngine

    @classmethod
    def build(cls, seed: int) -> "Engines":
        """Build the engines with the demo checkpoints."""
        drafting = {"method": "eagle3", "model": DRAFTER}

        def engine(speculation: Mapping[str, Any] | None) -> RolloutEngine:
            return RolloutEngine(
                TARGET,
                speculative_config=speculation,
                max_model_len=64,
                max_num_seqs=MAX_NUM_SEQS,
                page_size=PAGE_SIZE,
                seed=seed,
                verbose=True,
                **SHAPES,
            )

        return cls(
            speculative=engine({**drafting, "adaptive": True}),
            plain=engine(None),
            probe=engine({**drafting, "num_speculative_tokens": PROBE_K}),
        )

    def update(self, params: Any) -> float:
        """Update both rollout engines; return the seconds for the speculative engine."""
        self.plain.update_weights(params)
        return self.speculative.update_weights(params).seconds

    def roll_out(self, questions: Sequence[Question], samples: int, number: int) -> Rollouts:
        """Generate the answers of step `number` with both engines.

        Raises:
            RuntimeError: the engines' answers differ.
        """
        params = [
            SamplingParams(n=samples, seed=1000 * number + i, max_tokens=MAX_TOKENS)
            for i in range(len(questions))
        ]
        answers: dict[str, RolloutBatch] = {}
        seconds: dict[str, float] = {}
        order = ["speculative", "plain"]
        for name in order if number % 2 else reversed(order):  # the order alternates
            start = time.perf_counter()
            answers[name] = generate(getattr(self, name), questions, params)
            seconds[name] = time.perf_counter() - start
        return Rollouts(
            answers["speculative"],
            seconds["speculative"],
            seconds["plain"],
            compare(answers["speculative"], answers["plain"]),
        )

    def look(self, when: str, questions: Sequence[Question]) -> Moment:
        """Let the probe answer questions with the current weights of target and drafter."""
        probe, now = self.probe, self.speculative.params
        probe.update_weights(now.target, drafter=now.drafter)
        sampled = generate(probe, questions, SamplingParams(seed=0, max_tokens=MAX_TOKENS))
        acceptance = probe.acceptance()[-1].acceptance_length(PROBE_K)
        greedy = generate(probe, questions, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        accuracies = [float(rewards(questions, batch).mean()) for batch in (sampled, greedy)]
        return Moment(when, acceptance, *accuracies)

    def close(self) -> None:
        """Free the memory of all engines."""
        for engine in (self.speculative, self.plain, self.probe):
            engine.close()


def generate(
    engine: RolloutEngine,
    questions: Sequence[Question],
    params: SamplingParams | Sequence[SamplingParams],
) -> RolloutBatch:
    """Return answers to questions, ordered by question."""
    return engine.generate([question.prompt for question in questions], params)


def compare(ours: RolloutBatch, others: RolloutBatch) -> float:
    """Return the largest difference of log-probabilities between rollouts with the same tokens.

    Raises:
        RuntimeError: tokens differ, or the difference is above TOLERANCE.
    """
    largest = 0.0
    for one, other in zip(ours, others, strict=True):
        if not np.array_equal(one.token_ids, other.token_ids):
            raise RuntimeError(f"speculation changed a rollout: {one.text!r}, not {other.text!r}")
        largest = max(largest, float(np.abs(one.logprobs - other.logprobs).max()))
    if largest > TOLERANCE:
        raise RuntimeError(f"log-probabilities differ by {largest}, more than {TOLERANCE}")
    return largest
