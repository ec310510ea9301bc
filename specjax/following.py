"""Contains `follow`, the entry point of processes that share the `LLM` of another process."""

from pathlib import Path
from typing import Unpack

from specjax.engine.meeting import Meeting
from specjax.serving.agreement import meet
from specjax.serving.assembly import assemble
from specjax.serving.options import LLMOptions, read_options


def follow(model: str | Path, **options: Unpack[LLMOptions]) -> None:
    """Run the steps of process 0's `LLM` on this process's devices, until process 0 closes it.

    This call corresponds to `vllm serve --headless`. Process 0 builds an `LLM`, `AsyncLLM` or
    `RolloutEngine` with `nnodes`. Each other process calls `follow` with the same `nnodes`,
    `master_addr` and `master_port`, and its own `node_rank`.

    Args:
        model: this host's copy of the checkpoint.
        options: as for `LLM`. Options that are not given have process 0's values.

    Raises:
        ValueError: this process differs from process 0, or the options do not fit.
        CheckpointError: files are missing, damaged or of the wrong kind.
        HostsError: another process has ended or failed.
    """
    meeting = Meeting.take(read_options(options))
    given = {name: value for name, value in options.items() if name in LLMOptions.__annotations__}
    hosts, common = meet(given, meeting)
    assemble(model, hosts, **common).follow()
