"""Keeps a drafter accurate while its target is trained, by refits between rollouts.

A drafter imitates one target. With every update of the target's weights, fewer drafts are accepted.
A refit trains the drafter on the rollouts and on their hidden states (features), which the current
target computes. The drafter never changes the outputs.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from specjax.checks import check_positive
from specjax.rl.engine import RolloutEngine
from specjax.rl.rollouts import Rollout, Score
from specjax.train.data import Document
from specjax.train.features import Exported, FeatureSet
from specjax.train.loop import TrainState, begin, make_train_step
from specjax.train.losses import drafter_loss, split_frozen
from specjax.train.optimizer import steady_adamw
from specjax.train.teacher import Frozen

_REMEDY = "restore it into an engine of the same models, with the version of specjax that wrote it"
KEPT_CHECKPOINTS = 2  # the newest, and the previous checkpoint in case the newest is damaged


class RefitReport(NamedTuple):
    """The result of a refit."""

    first: dict[str, float]  # loss and accuracies of the first step
    last: dict[str, float]  # loss and accuracies of the last step
    num_rollouts: int  # number of rollouts trained on, including rollouts of earlier refits
    num_tokens: int  # number of output tokens trained on
    seconds: float


class OnlineDistiller:
    """The trainable copy of an engine's drafter, in float32, with its optimiser's state.

    If other code has replaced the engine's drafter, `refit` and `save` continue from the new
    drafter, with a new optimiser state. `num_steps` is not reset.

    Args:
        engine: an engine with an EAGLE-1, EAGLE-3, MTP, P-EAGLE, Medusa or DFlash-family drafter.
        learning_rate: the learning rate after ten steps of warm-up. It then stays constant, because
            the number of later refits is unknown.
        batch_size: the number of rollouts per step.
        length: the maximum number of tokens of a rollout to train on. The target computes hidden
            states of the whole rollout. If the rollout is longer than `length`, training drops the
            beginning of the prompt first, then the end of the output.
        num_unrolled: the number of consecutive draft tokens that the loss covers at each position.
            It has no effect for EAGLE-1 (always one) and Medusa (always one per head).
        memory: the maximum number of recent rollouts to keep. Later refits train on them, too.
        seed: the seed of the order of rollouts and of random numbers in the loss.

    Raises:
        ValueError: the drafter has no weights, the engine has several devices, or a number is out
            of range.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        learning_rate: float = 5e-4,
        batch_size: int = 16,
        length: int = 256,
        num_unrolled: int = 4,
        memory: int = 256,
        seed: int = 0,
    ):
        check_positive(
            batch_size=batch_size, length=length, num_unrolled=num_unrolled, memory=memory
        )
        if not 0 < learning_rate < 1:
            raise ValueError(f"learning_rate={learning_rate} must be in (0, 1)")
        drafter = engine.drafter
        if drafter.weights is None:
            raise ValueError(
                f"the engine has a {type(drafter).__name__}, which has no weights to refit; build "
                'it with a method like "eagle3", "mtp", "eagle", "p_eagle", "dflash" or "medusa"'
            )
        if (count := engine.target.num_devices) > 1:
            raise ValueError(
                f"the engine has tensor_parallel_size={count}, and drafters are refitted only on "
                "one device; refit in an engine on one device, and pass that engine's drafter "
                "(params.drafter) to update_drafter of this one"
            )
        self._engine = engine
        self._batch_size, self._length, self._seed = batch_size, length, seed
        self._memory = memory
        self._documents: list[Document] = []
        self._optimizer = steady_adamw(learning_rate)
        loss = drafter_loss(engine.target, drafter.weights, num_unrolled=num_unrolled)
        self._train_step = make_train_step(loss, self._optimizer, seed)
        self._version, self._state = engine.drafter_version, self._begin()

    @property
    def num_steps(self) -> int:
        """The number of training steps in all refits. `restore` sets it to the checkpoint's."""
        return int(self._state.step)

    def refit(self, rollouts: Sequence[Rollout], *, steps: int) -> RefitReport:
        """Train on the target's hidden states for rollouts, and update the engine's drafter.

        Training uses `rollouts` and the newest rollouts of earlier refits, at most `memory` in all.
        Rollouts without output tokens are ignored. The current target computes the hidden states.

        Args:
            steps: the number of training steps.

        Raises:
            ValueError: no rollouts with output tokens remain, or `steps` is not positive.
            RuntimeError: the engine's drafter was replaced during the refit. The engine keeps the
                new drafter.
        """
        check_positive(steps=steps)
        start = time.perf_counter()
        new = [
            Document(
                np.concatenate([one.prompt_token_ids, one.token_ids]), len(one.prompt_token_ids)
            )
            for one in rollouts
            if len(one.token_ids) > 0
        ]
        documents = [*new, *self._documents][: self._memory]
        if not documents:
            raise ValueError("refit needs rollouts with tokens, and there are none in memory")
        self._take_over()
        features = FeatureSet.exported(documents, self._scored(documents), self._length)
        self._documents = documents
        frozen = Frozen(self._engine.params.target, self._frozen)
        frozen = jax.device_put(frozen, self._place)
        log = []
        for step in range(self.num_steps, self.num_steps + steps):
            batch = features.batch_at(step, self._batch_size, self._seed)
            self._state, metrics = self._train_step(self._state, frozen, batch)
            log.append(metrics)
        first, last = ({k: float(v) for k, v in log[i].items()} for i in (0, -1))
        if self._engine.drafter_version != self._version:
            raise RuntimeError(
                "the engine got another drafter while this one was trained, and keeps it; refit "
                "again, which continues from the engine's"
            )
        self._publish(self._frozen)
        num_tokens = int(features.rows.is_answer.sum())
        return RefitReport(first, last, len(documents), num_tokens, time.perf_counter() - start)

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint of drafter, optimiser state, rollouts in memory and target's weights.

        The checkpoint is written atomically. `directory` keeps the newest two checkpoints.
        """
        self._take_over()
        arrays = self._arrays()
        facts = {
            "version": self._engine.version,
            "shapes": _shapes(arrays),
            "rollouts": [
                {"tokens": one.tokens.tolist(), "num_prompt": one.num_prompt}
                for one in self._documents
            ],
        }
        _write(_absolute(directory), arrays, facts)

    def restore(self, directory: str | Path) -> None:
        """Resume from the newest checkpoint.

        The weights of the engine's target and drafter are replaced. Later refits give the same bits
        as in an uninterrupted run with the same settings.

        Raises:
            ValueError: `directory` has no checkpoint; the checkpoint belongs to other models or to
                another version of specjax; or the engine's target has a newer version, or the same
                version but different weights.
        """
        engine = self._engine
        arrays, facts = _read(_absolute(directory), self._arrays())
        version = facts["version"]
        vocabularies = (part.get("target_ids") for part in (arrays["frozen"], self._frozen))
        if not _are_equal(*vocabularies):
            raise ValueError(
                f"{directory} is of a drafter with another vocabulary; restore into an engine of "
                "the drafter's checkpoint that training began with"
            )
        if version < engine.version:
            raise ValueError(
                f"{directory} has weights of version {version}, but the engine is at "
                f"{engine.version} already; restore into a new engine"
            )
        if version > engine.version:
            engine.update_weights(arrays["target"], version=version)
        elif not _are_equal(arrays["target"], engine.params.target):
            raise ValueError(
                f"{directory} and the engine have different weights of version {version}; restore "
                "into an engine of the checkpoint that training began with"
            )
        self._state = arrays["state"]
        self._documents = [
            Document(np.asarray(one["tokens"], np.int32), one["num_prompt"])
            for one in facts["rollouts"]
        ]
        self._publish(arrays["frozen"])

    @property
    def _frozen(self) -> dict[str, Any]:
        """The part of the engine's drafter that is not trained."""
        return split_frozen(self._engine.params.drafter)[1]

    @property
    def _place(self) -> jax.sharding.Sharding:
        return jax.tree.leaves(self._state.trainable)[0].sharding

    def _begin(self) -> TrainState:
        """Return a new training state that starts from the engine's drafter."""
        trainable, _ = split_frozen(self._engine.params.drafter)
        # Copies, because the engine replaces its arrays.
        trainable = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), trainable)
        # If some arrays were committed and others not, the step would be compiled twice.
        place = jax.tree.leaves(trainable)[0].sharding
        return jax.device_put(begin(trainable, self._optimizer), place)

    def _take_over(self) -> None:
        """Continue from the engine's drafter if code outside of this class has replaced it.

        The new drafter is trained with a new optimiser state. `num_steps` is not reset.
        """
        version = self._engine.drafter_version  # read before the weights, which may become newer
        if version != self._version:
            # The optimiser's state belongs to other weights.
            self._state = self._begin()._replace(step=self._state.step)
            self._version = version

    def _scored(self, documents: Sequence[Document]) -> Iterator[Exported]:
        """Yield each rollout's features (hidden states), computed by the current target.

        `documents` are the rollouts. Features are computed in batches, because the features of all
        rollouts at once could take too much memory: rollouts may be much longer than `length`.
        """
        for start in range(0, len(documents), self._batch_size):
            pairs = [
                (tokens[:num_prompt].tolist(), tokens[num_prompt:].tolist())
                for tokens, num_prompt in documents[start : start + self._batch_size]
            ]
            scores = self._engine.score(pairs, features=True)
            while scores:  # free each score before the next batch is scored
                yield _features(scores.pop(0))

    def _publish(self, frozen: Mapping[str, Any]) -> None:
        update = self._engine.update_drafter(replace(self._state.trainable, **frozen))
        self._version = update.version

    def _arrays(self) -> dict[str, Any]:
        """Return the arrays that a checkpoint stores. Rollouts are stored as JSON, not here."""
        target = self._engine.params.target
        return {"state": self._state, "frozen": self._frozen, "target": target}


def _features(score: Score) -> Exported:
    assert score.hidden is not None
    return score.hidden, score.auxiliary


def _absolute(directory: str | Path) -> Path:
    return Path(directory).expanduser().absolute()


def _write(folder: Path, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT_CHECKPOINTS)
    with ocp.CheckpointManager(folder, options=options) as checkpoints:
        newest = checkpoints.latest_step()
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(dict(arrays)), facts=ocp.args.JsonSave(dict(facts))
        )
        checkpoints.save(0 if newest is None else newest + 1, args=items)
        checkpoints.wait_until_finished()


def _read(folder: Path, own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the newest checkpoint's arrays, in a tree like `own`, and its JSON items.

    `own` is the result of `OnlineDistiller._arrays` for the engine in use.

    Raises:
        ValueError: there is no checkpoint, or its arrays do not match `own`.
    """
    none = ValueError(f"{folder} has no checkpoint of a distiller; save() writes one")
    if not folder.is_dir():
        raise none
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder, options=options) as checkpoints:
        newest = checkpoints.latest_step()
        if newest is None:
            raise none
        items = ocp.args.Composite(facts=ocp.args.JsonRestore())
        facts = checkpoints.restore(newest, args=items).facts
        _check_shapes(folder, facts["shapes"], _shapes(own))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, dict(own))
        items = ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract))
        try:
            return checkpoints.restore(newest, args=items).arrays, facts
        except ValueError as error:
            raise ValueError(f"{folder} stores its arrays in another form; {_REMEDY}") from error


def _shapes(tree: Any) -> dict[str, str]:
    """Return the dtype and shape of every array by path, like "float32[4, 3]"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _check_shapes(
    folder: Path, saved: Mapping[str, str], own: Mapping[str, str], max_shown: int = 4
) -> None:
    """Raise a ValueError that lists arrays whose dtype or shape differs from the engine's."""
    names = [name for name in sorted({*saved, *own}) if saved.get(name) != own.get(name)]
    if names:
        lines = [
            f"{name} is {saved.get(name, 'missing')}, the engine's is {own.get(name, 'missing')}"
            for name in names[:max_shown]
        ]
        more = f"; and {len(names) - max_shown} more" if len(names) > max_shown else ""
        listed = f"{'; '.join(lines)}{more}"
        raise ValueError(f"{folder} is of other models than the engine's: {listed}; {_REMEDY}")


def _are_equal(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)
