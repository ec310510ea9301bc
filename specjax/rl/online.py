"""Updates the weights of an `AsyncLLM` that serves requests, and records the versions."""

import time
from collections.abc import Callable
from typing import Any

from specjax.async_llm import AsyncLLM
from specjax.llm import LLM
from specjax.rl.elsewhere import check_folders, replace_elsewhere, stage_elsewhere
from specjax.rl.named import Weights, read_finite
from specjax.rl.weights import (
    WeightUpdate,
    next_version,
    read_update,
    replace_weights,
    stage_drafter,
    stage_target,
)


class OnlineWeights:
    """The weights of an `AsyncLLM`, which are replaced between two steps.

    Attributes:
        versions: all versions of the target's weights so far, ascending. The last is in use.
        drafter_version: the number of updates of the drafter's weights.
        is_torn: whether the weights mix two versions, because an update failed half-way.

    Args:
        on_tear: called on the engine's thread before each array of the target is replaced.
    """

    def __init__(self, llm: AsyncLLM, on_tear: Callable[[], Any] = lambda: None):
        self.versions = [0]
        self.drafter_version = 0
        self.is_torn = False
        self._llm, self._on_tear = llm, on_tear

    @property
    def version(self) -> int:
        """The version of the target's weights; 0 for the weights at construction."""
        return self.versions[-1]

    def update(
        self, weights: Weights, version: int | None = None, *, drafter: Weights = None
    ) -> WeightUpdate:
        """Replace the weights from the next step on, and wait until they are replaced.

        Unfinished requests continue: their cache is recomputed, and their next tokens come from the
        new weights. Calls must not overlap.

        Args:
            weights: as for `RolloutEngine.update_weights`; None to update only the drafter.
            version: the target's new version, above the current version; None for the next integer.
            drafter: weights of the drafter, as for `RolloutEngine.update_drafter`. If None, the
                drafter is updated only if `weights` include the weights of an MTP drafter.

        Raises:
            ValueError: the weights do not fit, cannot be read or are not finite, or the version is
                not higher. Nothing has changed.
            CheckpointError: a folder has no weights, or they are damaged. Nothing has changed.
        """
        number, start = next_version(self.version, version), time.perf_counter()
        engine = self._llm.apply(lambda llm: llm.engine).result()
        check_folders(engine, weights, drafter)
        if weights is None:
            named, own = None, read_finite(drafter, engine.params.drafter, "drafter's weights")
        else:
            named, own = read_update(weights, drafter, engine.params, engine.drafter)

        def replace(llm: LLM) -> WeightUpdate:
            params, target, drafts = engine.params, None, None
            if named is not None:
                target = stage_target(named, llm.target, params.target)
            if own is not None:
                drafts = stage_drafter(own, engine.drafter, params.drafter)
            stage_elsewhere(engine, weights, drafter)
            replace_elsewhere(engine)
            replace_weights(engine, llm.sleeps, target, drafts, tear=self._tear)
            self.drafter_version += drafts is not None
            if target is not None:
                self.is_torn = False
                self.versions.append(number)
            sources = [*(target or []), *(drafts or [])]
            shown = self.drafter_version if target is None else number
            return WeightUpdate.of(shown, sources, time.perf_counter() - start)

        return self._llm.apply(replace).result()

    def _tear(self) -> None:
        self.is_torn = True  # until all arrays are replaced
        self._on_tear()
