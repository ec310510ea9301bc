"""Checks whether the machine was free while measuring.

The checks use the CPU share, the load average, and the number of programs on the GPU. Linux counts
for each thread how long it ran and how long it waited for a processor. The CPU share is the time
that threads ran, divided by the time that they ran or waited. On an idle machine the share is above
0.8, because threads wait only for each other. If another program runs on each core, the share is
below 0.5.
"""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specjax.bench.environment import num_cpus

MIN_SHARE = 0.75
_THREADS = Path("/proc/self/task")
_NVIDIA_SMI = ("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")
_PATIENCE_SECONDS = 10  # for nvidia-smi, which may hang with a broken driver


@dataclass(frozen=True)
class Moment:
    """A point in time, and the CPU times of this process until then, in seconds.

    `threads` holds a pair (time run, time waited) per thread id.
    """

    time: float
    threads: dict[str, tuple[float, float]]

    @classmethod
    def now(cls) -> "Moment":
        """Read the clocks. Without Linux's `schedstat`, `threads` is empty."""
        threads = {}
        for path in _THREADS.glob("*/schedstat"):
            try:
                ran, waited, _ = path.read_text().split()
            except (OSError, ValueError):  # the thread has ended
                continue
            threads[path.parent.name] = int(ran) / 1e9, int(waited) / 1e9
        return cls(time.perf_counter(), threads)


@dataclass(frozen=True)
class CpuTime:
    """The time between two moments, in seconds. `ran` and `waited` are summed over threads."""

    seconds: float
    ran: float
    waited: float

    @classmethod
    def since(cls, start: Moment) -> "CpuTime":
        """Return the time from `start` until now."""
        now = Moment.now()
        spans = [(start.threads.get(name, (0, 0)), end) for name, end in now.threads.items()]
        ran, waited = (sum(end[i] - begin[i] for begin, end in spans) for i in (0, 1))
        return cls(now.time - start.time, ran, waited)


def cpu_share(spans: Sequence[CpuTime], num_cpus: int) -> float | None:
    """Return the time that threads ran, divided by the time that they ran or waited.

    If there are more threads than processors, some threads always wait for others of the same
    process. Therefore the divisor is limited to `num_cpus` times the time that passed. Return None
    if the times are unknown.
    """
    ran, waited = (sum(getattr(span, name) for span in spans) for name in ("ran", "waited"))
    asked = min(ran + waited, num_cpus * sum(span.seconds for span in spans))
    return min(1.0, ran / asked) if asked > 0 else None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Signs of other programs on the machine.

    Attributes:
        load: load average: mean number of processes that ran or waited, in the minute before the
            measurement.
        num_processors: number of processors of the machine.
        num_cpus: number of processors that this process may use.
        cpu_share: CPU share while measuring (see the function `cpu_share`); None if unknown.
        num_gpu_processes: number of other processes on the GPUs in use; 0 without a GPU.
    """

    load: float
    num_processors: int
    num_cpus: int
    cpu_share: float | None
    num_gpu_processes: int

    @classmethod
    def look(cls, load: float, spans: Sequence[CpuTime], *, num_gpus: int) -> "Machine":
        """Check the machine after a measurement.

        `load` is the load average before the measurement. `spans` are the CPU times of the
        measurement's rounds. `num_gpus` is the number of GPUs that the measurement used.
        """
        cpus = num_cpus()
        return cls(
            load=load,
            num_processors=os.cpu_count() or cpus,
            num_cpus=cpus,
            cpu_share=cpu_share(spans, cpus),
            num_gpu_processes=count_gpu_processes(num_gpus) if num_gpus else 0,
        )

    @property
    def doubts(self) -> list[str]:
        """Reasons not to trust the measured times; empty if there are none."""
        found = []
        load = f"load {self.load:.1f} on {self.num_processors} processors before it began"
        if self.cpu_share is None and self.load >= self.num_processors:
            found.append(f"other programs were running ({load})")
        if self.cpu_share is not None and self.cpu_share < MIN_SHARE:
            found.append(
                f"this process got {self.cpu_share:.0%} of the CPU time that it asked for ({load})"
            )
        if self.num_gpu_processes:
            found.append(f"{self.num_gpu_processes} other processes were on the GPU")
        return found

    @property
    def line(self) -> str | None:
        """A sentence with all reasons not to trust the times; None if there are no reasons."""
        if not self.doubts:
            return None
        return (
            f"DO NOT TRUST THESE TIMES: {' and '.join(self.doubts)}. Acceptance and outputs do "
            "not depend on it; repeat the times on an idle machine"
        )


def load_now() -> float:
    """Return the system's load average over the last minute, or 0 if unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def count_gpu_processes(num_gpus: int) -> int:
    """Count the other processes on the first `num_gpus` visible GPUs.

    This process must be using each of these GPUs. A process that uses several GPUs counts several
    times.
    """
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = ",".join((visible or [str(i) for i in range(num_gpus)])[:num_gpus])
    try:
        listed = subprocess.run(
            [*_NVIDIA_SMI, f"--id={gpus}"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    # In a container this process is listed with another id, or no process is listed.
    return max(0, sum(line.strip().isdigit() for line in listed.splitlines()) - num_gpus)
