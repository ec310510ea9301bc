"""Connects the processes of an LLM, and refuses processes with other options, versions or files.

Process 0 sends its options to the other processes. A caller can also set options in another
process, but only to the values of process 0. Exceptions are paths and options like `verbose`, which
each process sets for itself. Each process reads its own copy of the checkpoint.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from specjax.checkpoint.files import find_weights
from specjax.config import EngineConfig, SpeculativeConfig
from specjax.device.placement import default_device
from specjax.engine.executables import sources_digest
from specjax.engine.hosts import LEADER, Hosts
from specjax.engine.meeting import Meeting, join
from specjax.serving.options import DEFAULTS

# Options that may differ between processes.
OWN = {"verbose", "compilation_cache", "params", *Meeting._fields}
FITTED = "num_pages", "num_snapshots"  # depend on the free memory, so the smallest number counts


def lead(model: Any, meeting: Meeting, options: Mapping[str, Any]) -> Hosts | None:
    """Connect with the other processes as process 0, and return the connection.

    Return None if there are no other processes.

    Raises:
        ValueError: this is not process 0, the options do not allow other processes, or another
            process has other versions or options.
        RuntimeError: see `join`.
    """
    if meeting.nnodes == 1:
        return None
    is_initialized = jax.distributed.is_initialized()
    rank = jax.process_index() if is_initialized else meeting.node_rank
    if rank not in (LEADER, None):
        raise ValueError(
            f"node_rank={rank}: only process 0 has an LLM; call specjax.follow here, with the same "
            "model and options"
        )
    if not isinstance(model, str | Path):
        raise ValueError(
            f"nnodes={meeting.nnodes} needs a checkpoint, which each process reads, not a Model "
            "value; save it with save_model"
        )
    if options["tensor_parallel_size"] % meeting.nnodes:
        raise ValueError(
            f"tensor_parallel_size={options['tensor_parallel_size']} must be a multiple of nnodes="
            f"{meeting.nnodes}: each process has as many devices"
        )
    if options["data_parallel_size"] != 1:
        raise ValueError(
            f"data_parallel_size={options['data_parallel_size']} does not go with nnodes="
            f"{meeting.nnodes}: replicas are on one host; run an LLM per replica, or RayRollouts"
        )
    hosts = join(meeting)
    with hosts:
        _share_options(hosts, options)
    return hosts


def meet(options: Mapping[str, Any], meeting: Meeting) -> tuple[Hosts, dict[str, Any]]:
    """Connect with process 0 as another process. Return the connection, and process 0's options.

    `options` are the options given to this process.

    Raises:
        ValueError: this is process 0, or a process has other versions or options than process 0.
        RuntimeError: see `join`.
    """
    if meeting.nnodes == 1 or meeting.node_rank == LEADER:
        raise ValueError(
            f"nnodes={meeting.nnodes}, node_rank={meeting.node_rank}: specjax.follow is for "
            "processes 1 to nnodes - 1; process 0 builds an LLM"
        )
    hosts = join(meeting)
    with hosts:
        return hosts, _share_options(hosts, options)


def _share_options(hosts: Hosts, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check that all processes have equal versions and options, and return this process's options.

    Options that this process does not set are taken from process 0. Options such as paths can
    differ between processes.

    Raises:
        ValueError: a process has other versions or options than process 0.
    """
    agree(
        hosts,
        {
            "sources of specjax (digest)": sources_digest()[:12],
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
        },
        "install the same versions everywhere",
    )
    own = {name: value for name, value in options.items() if name not in OWN}
    each = hosts.gather(own)
    common = each[LEADER]
    _refuse(
        hosts,
        [
            (rank, name, value, common[name])
            for rank, given in enumerate(each)
            for name, value in given.items()
            if not _is_equal(value, common[name])
        ],
        "give all processes the same options, or only process 0",
    )
    return {**DEFAULTS, **common, **options}


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values of an option are equal.

    For two mappings, only their common keys are compared. Paths of models and of profiles are not
    compared.
    """
    pair: list[Any] = [asdict(x) if isinstance(x, SpeculativeConfig) else x for x in (one, other)]
    if all(isinstance(x, Mapping) for x in pair):
        names = (pair[0].keys() & pair[1].keys()) - {"model", "dynamic_config_path"}
        return all(pair[0][name] == pair[1][name] for name in names)
    if all(isinstance(x, Sequence) and not isinstance(x, str) for x in pair):
        return [*pair[0]] == [*pair[1]]
    return pair[0] == pair[1]


def agree(hosts: Hosts, values: Mapping[str, Any], remedy: str) -> None:
    """Check that all processes have equal `values` under the same names.

    `remedy` becomes part of the error message.

    Raises:
        ValueError: a process has another value than process 0. The message names the two values.
    """
    each = hosts.gather(dict(values))
    common = each[LEADER]
    differing = [
        (rank, name, given[name], common[name])
        for rank, given in enumerate(each)
        for name in common
        if given[name] != common[name]
    ]
    _refuse(hosts, differing, remedy)


def _refuse(hosts: Hosts, differing: list[tuple[int, str, Any, Any]], remedy: str) -> None:
    if differing:
        listed = "; ".join(
            f"{hosts.name(rank)} has {name}={value!r}, process 0 has {common!r}"
            for rank, name, value, common in differing
        )
        raise ValueError(f"the processes of this LLM differ: {listed}; {remedy}")


def agree_on_files(hosts: Hosts, folder: Path, drafter: Path | None) -> None:
    """Check that all processes have the same checkpoints and kinds of devices.

    Raises:
        ValueError: a process has another checkpoint or kind of device than process 0.
    """
    agree(
        hosts,
        {
            "checkpoint (digest of config and tensor tables)": _digest(folder),
            "drafter (digest of config and tensor tables)": drafter and _digest(drafter),
            "device": default_device().device_kind,
        },
        "give all processes the same checkpoints and devices",
    )


def agreed_config(hosts: Hosts, config: EngineConfig) -> EngineConfig:
    """Return the config that all processes use.

    The numbers of pages and snapshots depend on each process's free memory, so the smallest numbers
    are used. All other fields must be equal.

    Raises:
        ValueError: another field differs.
    """
    each = hosts.gather(config)
    least = {name: min(getattr(one, name) for one in each) for name in FITTED}
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    agree(hosts, values | least, "set these options")
    return replace(config, **least)


def _digest(folder: Path) -> str:
    """Return a digest of a checkpoint's config and weight files.

    For a weight file, the digest covers the name, the size and the safetensors header, but not the
    weights.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(find_weights(folder)):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                digest.update(file.read(int.from_bytes(file.read(8), "little")))
    return digest.hexdigest()[:12]
