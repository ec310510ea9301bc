"""Whether the machine was free for a measurement: CPU share, load, other programs on the GPU.

A process asks for CPU time by having threads that could run. Linux counts for each thread how long
it ran and how long it waited for a processor. On an idle machine the share of both in which threads
ran is above 0.8, because a process waits only for itself; next to another program on each core it
is below 0.5.
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
    """CPU time of this process until now, in seconds; threads are (ran, waited) by their ids."""

    time: float
    threads: dict[str, tuple[float, float]]

    @classmethod
    def now(cls) -> "Moment":
        """Read the clocks; without Linux's `schedstat` there are no threads."""
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
    """CPU time between two moments, in seconds, summed over threads."""

    seconds: float
    ran: float
    waited: float

    @classmethod
    def since(cls, start: Moment) -> "CpuTime":
        """Return the span from `start` until now."""
        now = Moment.now()
        differences = [
            (ran - start.threads.get(name, (0, 0))[0], waited - start.threads.get(name, (0, 0))[1])
            for name, (ran, waited) in now.threads.items()
        ]
        ran, waited = (sum(values) for values in zip(*differences, strict=True))
        return cls(now.time - start.time, ran, waited)


def cpu_share(spans: Sequence[CpuTime], num_cpus: int) -> float | None:
    """Return the part of the CPU time that a process asked for and got; None if it is unknown.

    A process cannot ask for more than all processors: beyond that its threads wait for each other.
    """
    ran, waited = (sum(getattr(span, name) for span in spans) for name in ("ran", "waited"))
    asked = min(ran + waited, num_cpus * sum(span.seconds for span in spans))
    return min(1.0, ran / asked) if asked > 0 else None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was seen of other programs.

    Attributes:
        load: processes that ran or waited, on average over the minute before the measurement.
        num_processors: of the machine, of which this process may use `num_cpus`.
        cpu_share: while measuring, see the function; None if unknown.
        num_gpu_processes: other processes on the GPU; 0 without one.
    """

    load: float
    num_processors: int
    num_cpus: int
    cpu_share: float | None
    num_gpu_processes: int

    @classmethod
    def look(cls, load: float, spans: Sequence[CpuTime], *, has_gpu: bool) -> "Machine":
        """Look at the machine after a measurement; `load` is from before it."""
        cpus = num_cpus()
        return cls(
            load=load,
            num_processors=os.cpu_count() or cpus,
            num_cpus=cpus,
            cpu_share=cpu_share(spans, cpus),
            num_gpu_processes=count_gpu_processes() if has_gpu else 0,
        )

    @property
    def doubts(self) -> list[str]:
        """Why times are not to be trusted; empty if they are."""
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
        """A sentence about the doubts; None without any."""
        if not self.doubts:
            return None
        return (
            f"TIMES ARE NOT TO BE TRUSTED: {' and '.join(self.doubts)}. Acceptance and outputs do "
            "not depend on it; repeat the times on an idle machine"
        )


def load_now() -> float:
    """Return the mean load of the last minute, 0 where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def count_gpu_processes() -> int:
    """Count the processes on the first visible GPU without this one, which must use it."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    try:
        listed = subprocess.run(
            [*_NVIDIA_SMI, f"--id={gpu}"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    # In a container this process has another id there, or nothing is listed at all.
    return max(0, sum(line.strip().isdigit() for line in listed.splitlines()) - 1)
