"""Rollouts for reinforcement learning, from an engine whose weights a trainer updates.

Names are imported on first use, so that each name needs only its own dependencies.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.device.models.registry import save_model
    from specjax.rl.distill import OnlineDistiller, RefitReport
    from specjax.rl.engine import RolloutEngine
    from specjax.rl.folders import read_weights
    from specjax.rl.freshness import VersionAcceptance
    from specjax.rl.history import RolloutHistory
    from specjax.rl.ray_pool import WorkersDied
    from specjax.rl.ray_workers import RayRollouts
    from specjax.rl.rollouts import (
        JoinedRollouts,
        PaddedRollouts,
        Rollout,
        RolloutBatch,
        RolloutError,
        Score,
        Span,
    )
    from specjax.rl.tunix import TunixRollout
    from specjax.rl.weights import WeightUpdate

__all__ = [
    "JoinedRollouts",
    "OnlineDistiller",
    "PaddedRollouts",
    "RayRollouts",
    "RefitReport",
    "Rollout",
    "RolloutBatch",
    "RolloutEngine",
    "RolloutError",
    "RolloutHistory",
    "Score",
    "Span",
    "TunixRollout",
    "VersionAcceptance",
    "WeightUpdate",
    "WorkersDied",
    "read_weights",
    "save_model",
]

_MODULES = {
    "OnlineDistiller": "specjax.rl.distill",
    "RefitReport": "specjax.rl.distill",
    "RolloutEngine": "specjax.rl.engine",
    "RolloutError": "specjax.rl.rollouts",
    "RolloutHistory": "specjax.rl.history",
    "VersionAcceptance": "specjax.rl.freshness",
    "RayRollouts": "specjax.rl.ray_workers",
    "WorkersDied": "specjax.rl.ray_pool",
    "JoinedRollouts": "specjax.rl.rollouts",
    "PaddedRollouts": "specjax.rl.rollouts",
    "Rollout": "specjax.rl.rollouts",
    "RolloutBatch": "specjax.rl.rollouts",
    "Score": "specjax.rl.rollouts",
    "Span": "specjax.rl.rollouts",
    "TunixRollout": "specjax.rl.tunix",
    "WeightUpdate": "specjax.rl.weights",
    "read_weights": "specjax.rl.folders",
    "save_model": "specjax.device.models.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
