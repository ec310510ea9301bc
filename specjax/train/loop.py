"""Runs training steps, prints progress, and saves checkpoints from which a killed run resumes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
import orbax.checkpoint as ocp
from rich.console import Console

from specjax.checkpoint.writing import naming
from specjax.engine.log import Pace
from specjax.train.optimizer import muon_and_adamw

TIMED_STEPS = 5  # number of steps from which the total time is estimated

# A function that returns the batch of a step; the same step always has the same batch.
Batches = Callable[[int], Any]
# A function of (trainable, frozen, batch, key) that returns (loss, metrics).
Loss = Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The number of steps, batch shape, learning rate and seed of a training run."""

    steps: int
    batch_size: int  # rows per step
    length: int  # tokens per row
    learning_rate: float  # the maximum during the run
    seed: int


class TrainState(NamedTuple):
    """The state that is passed from one training step to the next."""

    trainable: Any
    opt_state: Any
    step: jax.Array  # i32[], number of steps taken


def begin(trainable: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state before the first step."""
    return TrainState(trainable, optimizer.init(trainable), jax.numpy.int32(0))


def make_train_step(
    loss: Loss, optimizer: optax.GradientTransformation, seed: int
) -> jax.stages.Wrapped:
    """Return a jitted function that takes one step of minimising `loss`.

    The function takes (state, frozen, batch) and returns (state, metrics). A step's random key
    depends only on `seed` and the step's number.
    """

    @jax.jit
    def train_step(state: TrainState, frozen: Any, batch: Any):
        trainable, opt_state, step = state
        key = jax.random.fold_in(jax.random.key(seed), step)
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(
            trainable, frozen, batch, key
        )
        with jax.numpy_dtype_promotion("standard"):  # optax needs it
            updates, opt_state = optimizer.update(grads, opt_state, trainable)
        metrics = {"loss": value, **metrics, "grad_norm": optax.tree.norm(grads)}
        return TrainState(optax.apply_updates(trainable, updates), opt_state, step + 1), metrics

    return train_step


def fit(
    trainable: Any,
    frozen: Any,
    labels: Any,
    loss: Loss,
    batches: Batches,
    directory: Path,
    schedule: Schedule,
    *,
    log_every: int = 20,
    save_every: int = 100,
) -> tuple[Any, list[dict[str, float]]]:
    """Minimise `loss` over `trainable`; return the trained tree and the log of metrics.

    `frozen` holds the arrays that the loss reads but does not train. `labels` names the
    optimiser of each trained array; see `muon_and_adamw`.

    The state is saved under `directory` every `save_every` steps and after the last step,
    atomically. A run that finds a checkpoint in `directory` resumes from it: batches and random
    keys depend only on the step.

    Raises:
        ValueError: the checkpoint does not fit this run's parameters.
    """
    console, pace = Console(stderr=True), Pace()
    steps = schedule.steps
    optimizer = muon_and_adamw(labels, schedule.learning_rate, steps)
    train_step = make_train_step(loss, optimizer, schedule.seed)
    state = begin(trainable, optimizer)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=save_every)
    log: list[dict[str, float]] = []
    compiled = None
    with (
        naming(directory),
        ocp.CheckpointManager(directory.absolute(), options=options) as checkpoints,
    ):
        first = checkpoints.latest_step() or 0
        if first:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            try:
                state = checkpoints.restore(first, args=ocp.args.StandardRestore(abstract))
            except ValueError as error:
                raise ValueError(
                    f"{directory} has a checkpoint of other parameters; choose another folder, or "
                    "resume with the options and the version of specjax that wrote it"
                ) from error
            console.print(f"resumed at step {first} from {directory}")
        start = measured = time.perf_counter()
        for step in range(first, steps):
            batch = batches(step)
            if compiled is None:
                console.print("compiling the update")
                compiled = train_step.lower(state, frozen, batch).compile()
                console.print(_memory(compiled), highlight=False, soft_wrap=True)
            state, metrics = compiled(state, frozen, batch)
            if step in (first, first + TIMED_STEPS):  # the first step takes longer
                jax.block_until_ready(metrics)
                begun, measured = measured, time.perf_counter()
                if step > first:
                    text = _time_left((measured - begun) / TIMED_STEPS, steps - step - 1)
                    console.print(text, highlight=False, soft_wrap=True)
            if (step + 1) % log_every == 0 or step + 1 == steps:
                row = {"step": step + 1, **{name: float(value) for name, value in metrics.items()}}
                log.append(row)
                seconds = (time.perf_counter() - start) / (step + 1 - first)
                text = "  ".join(f"{name} {value:.4g}" for name, value in row.items())
                console.print(f"{text}  {seconds:.2f} s/step", highlight=False, soft_wrap=True)
            elif pace.is_due():
                jax.block_until_ready(metrics)
                console.print(f"step {step + 1} of {steps}", highlight=False)
            checkpoints.save(step + 1, args=ocp.args.StandardSave(state), force=step + 1 == steps)
        checkpoints.wait_until_finished()
    return state.trainable, log


def _memory(compiled: jax.stages.Compiled) -> str:
    stats = compiled.memory_analysis()
    size = "an unknown amount" if stats is None else f"{stats.temp_size_in_bytes / 2**20:,.0f} MiB"
    return f"memory of activations, by the compiled step: {size}"


def _time_left(seconds: float, steps: int) -> str:
    return (
        f"about {seconds * steps / 60:.1f} minutes for the other {steps} steps: measured, "
        f"{TIMED_STEPS} steps took {seconds:.2f} s each"
    )
