"""Updates the weights of an engine whose devices belong to several processes.

Each process reads the new weights from its own copy of a folder. All processes read and check them
before the first process replaces a weight.
"""

from pathlib import Path
from typing import Any

from specjax.engine.engine import Engine
from specjax.engine.follower import Follower
from specjax.rl.named import Weights, read_finite
from specjax.rl.quantising import all_sources
from specjax.rl.weights import read_update, stage_drafter, stage_target


def check_folders(engine: Engine, *given: Weights) -> None:
    """Check that the engine's other processes, if any, can read the weights in `given`.

    Other processes can read weights only from a folder. None means no weights.

    Raises:
        ValueError: there are other processes, and one of `given` is neither a folder nor None.
    """
    count = engine.engines[0].programs.num_processes
    for weights in given:
        if count > 1 and not isinstance(weights, str | Path | None):
            raise ValueError(
                f"weights as {type(weights).__name__} do not reach the other of nnodes={count} "
                "processes; save them, and give the folder, which each process reads"
            )


def stage_elsewhere(engine: Engine, weights: Weights, drafter: Weights) -> None:
    """Let the engine's other processes, if any, read and check new weights.

    `weights` are new weights of the target, and `drafter` new weights of the drafter. None keeps
    the old weights.

    Raises:
        HostsError: a process cannot use its copy of a folder. No weights have changed.
    """
    programs = engine.engines[0].programs
    if programs.num_processes > 1:
        programs.elsewhere(_stage, weights, drafter)


def replace_elsewhere(engine: Engine) -> None:
    """Let the other processes use the weights that they have read in `stage_elsewhere`.

    Call this only while no step is in flight.

    Raises:
        HostsError: a process has failed.
    """
    engine.engines[0].programs.elsewhere(_replace)


def _stage(follower: Follower, weights: Weights, drafter: Weights) -> None:
    params = follower.params
    sources = own = None
    if weights is None:
        named = read_finite(drafter, params.drafter, "drafter's weights")
    else:
        new, named = read_update(weights, drafter, params, follower.drafter)
        sources = stage_target(new, follower.target, params.target)
    if named is not None:
        own = stage_drafter(named, follower.drafter, params.drafter)
    follower.staged = tuple(all_sources(params, follower.drafter, sources, own))


def _replace(follower: Follower) -> None:
    sources, follower.staged = follower.staged, ()

    def change(i: int, leaf: Any, home: Any) -> Any:
        return leaf if sources[i] is None else sources[i].copy(leaf.dtype, home)

    follower.sleep.change(change)
