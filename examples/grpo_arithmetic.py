"""Trains a model to add by GRPO. Speculative rollouts are checked against plain rollouts.

    python examples/grpo_arithmetic.py --output runs/grpo

Three engines run the weights of an optax trainer. The first two engines are updated after every
step:

- "speculative" drafts with EAGLE-3 and adaptive K; its rollouts train the policy;
- "plain" has no drafter. It repeats every rollout, and must give the same tokens and the same
  log-probabilities. Its time is the baseline;
- "probe" always drafts three tokens, so that acceptance can be compared over time. It answers the
  held-out questions.

The demo model cannot add. First it imitates worked answers (`arithmetic.py`), half of them with a
wrong digit, so that it gets some sums right. This shifts the policy far from the model that the
drafter imitates, so acceptance falls. Then GRPO raises the reward. Every `--refit-every` steps the
drafter is refitted to the current policy, on the latest rollouts.

The folder `--output` gets results.json and plot.png: reward, acceptance length and K by step.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from arithmetic import NUM_QUESTIONS, Question, split_questions
from grpo import begin, grpo_loss, improve, make_optimizer, make_update, rewards
from grpo_engines import PROBE_K, Engines, Moment
from grpo_plot import plot_steps
from imitation import Imitation, Policy, imitate
from rich.console import Console

from specjax.bench.environment import describe_environment
from specjax.rl import OnlineDistiller, Rollout, RolloutEngine

REFIT_ROLLOUTS = 256  # number of newest rollouts that a refit trains on


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run."""

    steps: int = 40
    questions: int = 8  # number per step
    samples: int = 8  # number per question
    minibatches: int = 2  # number per step
    learning_rate: float = 1e-4
    imitation_steps: int = 100
    imitation_batch: int = 16
    imitation_rate: float = 1e-3
    slip_rate: float = 0.5  # fraction of imitated answers with a wrong digit
    refit_every: int = 10
    refit_steps: int = 60
    held_out: int = 64  # number of questions
    seed: int = 0

    def __post_init__(self):
        for name, value in asdict(self).items():
            if value < 0 or (value == 0 and name != "seed"):
                raise ValueError(f"{name}={value} must be positive")
        if self.samples < 2:
            raise ValueError(f"samples={self.samples} must be 2 or more, to compare")
        if self.questions * self.samples % self.minibatches:
            raise ValueError(
                f"minibatches={self.minibatches} must divide the {self.questions} x {self.samples}"
                " rollouts of a step, since every shape is compiled"
            )
        if self.held_out + self.questions > NUM_QUESTIONS:
            raise ValueError(
                f"held_out={self.held_out} leaves less than the {self.questions} questions of a "
                f"step, of {NUM_QUESTIONS}; lower it"
            )

    @property
    def imitation(self) -> Imitation:
        """The settings of the imitation."""
        return Imitation(
            steps=self.imitation_steps,
            batch=self.imitation_batch,
            rate=self.imitation_rate,
            slip_rate=self.slip_rate,
            seed=self.seed,
        )


class Step(NamedTuple):
    """The measurements of a GRPO step."""

    number: int
    reward: float
    acceptance_length: float  # mean over rounds with drafts, of any K
    mean_k: float
    speculative_seconds: float  # duration of the speculative rollouts
    plain_seconds: float
    update_seconds: float  # to update the policy
    sync_seconds: float  # to update the speculative engine's weights
    logprob_difference: float  # largest difference between "speculative" and "plain"


HEADER = "step  reward  accepted  mean K  rollouts (s)  plain (s)  update (s)  sync (s)"
LINE = "{:4}  {:6.3f}  {:8.2f}  {:6.2f}  {:12.2f}  {:9.2f}  {:10.2f}  {:8.3f}"


def run(settings: Settings, console: Console) -> dict[str, Any]:
    """Train by imitation, then by GRPO. Return the results as plain types."""
    start = time.perf_counter()
    train, held_out = split_questions(settings.seed, settings.held_out)
    console.print("building three engines, which compile all their programs")
    engines = Engines.build(settings.seed)
    console.print(f"three engines built in {time.perf_counter() - start:.0f} s")
    moments: list[Moment] = []

    def look(when: str) -> None:
        moments.append(moment := engines.look(when, held_out))
        console.print(
            f"  {when}: acceptance length {moment.acceptance_length:.2f} at K = {PROBE_K}; "
            f"right: {moment.sampled_accuracy:.2f} sampled, {moment.greedy_accuracy:.2f} greedy"
        )

    look("as shipped")
    console.print(f"imitating {settings.imitation_steps} batches of worked answers")
    engines.update(imitate(policy_of(engines.speculative), train, settings.imitation))
    look("after imitation")
    console.print("one step to warm up, not timed")
    engines.roll_out(train[: settings.questions], settings.samples, 0)
    steps = train_policy(engines, train, settings, console, look)
    look("at the end")
    engines.close()
    return {
        "settings": asdict(settings),
        "environment": describe_environment(),
        "seconds": time.perf_counter() - start,
        "summary": summarize(steps, moments, settings.refit_every),
        "moments": [moment._asdict() for moment in moments],
        "steps": [step._asdict() for step in steps],
    }


def policy_of(engine: RolloutEngine) -> Policy:
    """Return the model that an engine runs."""
    assert engine.tokenizer is not None
    return Policy(engine.target, engine.params.target, engine.tokenizer, engine.eos_ids[0])


def train_policy(
    engines: Engines,
    train: Sequence[Question],
    settings: Settings,
    console: Console,
    look: Callable[[str], None],
) -> list[Step]:
    """Run the training loop, and return the measurements of its steps.

    A step generates rollouts, computes rewards, updates the policy, and sends the weights to the
    engines. After every `refit_every` steps, the drafter is refitted.
    """
    rng = np.random.default_rng(settings.seed)
    engine = engines.speculative
    optimizer = make_optimizer(settings.learning_rate)
    update = make_update(engine.target, optimizer, grpo_loss)
    learner = begin(engine.params.target, optimizer)
    distiller = OnlineDistiller(engine, length=64, memory=REFIT_ROLLOUTS, seed=settings.seed)
    recent: deque[Rollout] = deque(maxlen=REFIT_ROLLOUTS)
    steps: list[Step] = []
    console.print(HEADER)
    for number in range(1, settings.steps + 1):
        chosen = rng.choice(len(train), settings.questions, replace=False)
        questions = [train[i] for i in chosen]
        rollouts = engines.roll_out(questions, settings.samples, number)
        acceptance = engine.acceptance()[-1]
        judged = rewards(questions, rollouts.answers)
        begun = time.perf_counter()
        learner = improve(update, learner, rollouts.answers, judged, settings.minibatches, rng)
        step = Step(
            number,
            float(judged.mean()),
            acceptance.mean_acceptance_length,
            acceptance.mean_k,
            rollouts.speculative_seconds,
            rollouts.plain_seconds,
            time.perf_counter() - begun,
            engines.update(learner.params),
            rollouts.logprob_difference,
        )
        steps.append(step)
        console.print(LINE.format(*step[:-1]))
        recent.extend(rollouts.answers)
        if number % settings.refit_every == 0 and number < settings.steps:
            look(f"step {number}, before a refit")
            console.print(f"refitting the drafter, {settings.refit_steps} steps")
            report = distiller.refit([*recent], steps=settings.refit_steps)
            look(f"step {number}, after a refit of {report.seconds:.0f} s")
    return steps


def summarize(steps: Sequence[Step], moments: Sequence[Moment], refit_every: int) -> dict[str, Any]:
    """Return a summary of the run. A ratio of times is [median, lower quartile, upper quartile]."""
    shipped, imitated, *refits, end = moments
    fresh = [step for step in steps if step.number > refit_every]
    summary: dict[str, Any] = {
        "reward_first_five": float(np.mean([step.reward for step in steps[:5]])),
        "reward_last_five": float(np.mean([step.reward for step in steps[-5:]])),
        "greedy_accuracy": [m.greedy_accuracy for m in (shipped, imitated, end)],
        "sampled_accuracy": [m.sampled_accuracy for m in (shipped, imitated, end)],
        "times_as_fast_stale": speedup(steps[:refit_every]),
        "times_as_fast_refitted": speedup(fresh) if fresh else None,
        "logprob_difference": max(step.logprob_difference for step in steps),
    }
    if refits:
        stale, refitted = (moment.acceptance_length for moment in refits[:2])
        summary["acceptance_length"] = [shipped.acceptance_length, stale, refitted]
        lost = shipped.acceptance_length - stale
        summary["part_recovered"] = (refitted - stale) / lost if lost else None
    return summary


def speedup(steps: Sequence[Step]) -> list[float]:
    """Return the ratio of plain to speculative rollout times, as a median and two quartiles."""
    ratios = [step.plain_seconds / step.speculative_seconds for step in steps]
    return [float(np.quantile(ratios, q)) for q in (0.5, 0.25, 0.75)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example with options from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in asdict(Settings()).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=type(default), default=default, help="default: %(default)s"
        )
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    given = vars(parser.parse_args(arguments))
    output: Path = given.pop("output")
    try:
        settings = Settings(**given)
    except ValueError as error:
        parser.error(str(error))
    output.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    results = run(settings, console)
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot_steps(results, output / "plot.png")
    console.print_json(data=results["summary"])


if __name__ == "__main__":
    main()
