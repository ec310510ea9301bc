"""Plans measurements on a GPU machine, as calls of limited time. Each gets a copy of the work tree.

    python benchmarks/gpu/plan.py                 plan for 15 minutes, 10 per call, 64 MiB of files
    python benchmarks/gpu/plan.py --report FILE   print the faults in the returned lines
    python benchmarks/gpu/plan.py --dry-run       run here: tiny shapes, kernels interpreted

A call is one command with a few blocks. Each block is a `run.py` with a separate budget, so that no
block takes the time of another block. Checks that could invalidate all other results come first.
Results are written immediately as lines in the output folder. A call ends if two cases in a row
hang.

Issue the calls back to back, because idle time on the machine counts. The same plan can be repeated
on a card with more memory. Most kernels' times then differ, because they depend on the card's copy
bandwidth.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cases import select
from machine import commit_of
from run import HUNG, MAX_HUNG

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = "../left-out"  # folder for checkpoints that a call does not need
MIB = 2**20
START_SECONDS, MARGIN_SECONDS = 60, 10  # time to start a machine, and spare time per call
# Fields of a line that must not be false, and fields that identify the measurement.
HOLD = "passes", "is_repeatable", "is_same"
ABOUT = "what", "model", "shape", "dtype", "batch", "k", "way"
LLAMA = ("demo-llama", "demo-llama-eagle1", "demo-llama-eagle3", "demo-llama-dflash")
QWEN = ("demo-qwen3.5",)


@dataclass(frozen=True)
class Block:
    """Cases with a common budget, and the demo checkpoints that they read."""

    seconds: int
    cases: tuple[str, ...]
    checkpoints: tuple[str, ...] = ()


BLOCKS = (
    Block(100, ("card", "smoke")),
    Block(120, ("memory",)),
    Block(120, ("tokens/demo-llama-float32",), LLAMA),
    Block(140, ("grid/1", "grid/64")),
    Block(60, ("kernels/delta_rule",)),
    Block(60, ("kernels/others",)),
    Block(120, ("tokens/demo-qwen3.5-float32", "tokens/demo-qwen3.5-bfloat16"), QWEN),
    Block(130, ("models/Qwen3.5-27B",)),
    Block(100, ("models/Qwen3.5-4B",)),
    Block(100, ("profile/Llama-3.1-8B", "profile/Qwen3.5-27B")),
    Block(150, ("kernels/delta_rule_tiles",)),
    Block(180, ("correct/float32", "correct/bfloat16")),
    Block(100, ("watch/arrivals",)),
    Block(60, ("watch/updates",)),
    Block(90, ("graphs/tokens",), LLAMA),
    Block(120, ("tokens/demo-llama-bfloat16",), LLAMA),
    Block(90, ("host/64",)),
    Block(120, ("early_launch",)),
    Block(80, ("small",)),
    Block(200, ("start",)),
    Block(200, ("adaptive",)),
    Block(110, ("watch/compiling",)),
    Block(100, ("profile/Llama-3.2-1B", "profile/Qwen3.5-4B")),
    Block(60, ("kernels/latents",)),
    Block(100, ("projections/many",)),
    Block(80, ("kernels/attention",)),
    Block(80, ("grid/256",)),
    Block(60, ("prefill",)),
    Block(80, ("projections/few",)),
    Block(150, ("kernels/tiles",)),
    Block(150, ("kernels/scaled",)),
    Block(150, ("loading",)),
    Block(120, ("host/1", "graphs/off", "graphs/on")),
    Block(180, ("grid/16", "grid/4", "grid/128")),
    Block(300, ("peers",)),
    Block(300, ("parallel",)),  # a line that says so where there is one GPU
)


@dataclass(frozen=True)
class Limits:
    """The limits of a machine.

    Attributes:
        total: seconds for all calls together.
        command: seconds per call.
        size: bytes of files per call.
    """

    total: float
    command: float
    size: float

    def pack(self, sizes: dict[str, int], rest: int) -> Iterator[list[list[Block]]]:
        """Yield lists of calls. Each list fits in the time of one machine.

        A call is a list of blocks, in order.

        Args:
            sizes: the bytes of each checkpoint by name.
            rest: the bytes of all other files, which are sent with every call.

        Raises:
            ValueError: a block does not fit even in a separate call.
        """
        calls: list[list[Block]] = []
        left = self.total - START_SECONDS
        for block in BLOCKS:
            if calls and block.seconds <= left and self._fits([*calls[-1], block], sizes, rest):
                calls[-1].append(block)
                left -= block.seconds
                continue
            if calls and _seconds([block]) > left:
                yield calls
                calls, left = [], self.total - START_SECONDS
            if _seconds([block]) > left or not self._fits([block], sizes, rest):
                size = (rest + sum(sizes[name] for name in block.checkpoints)) / MIB
                raise ValueError(
                    f"{' '.join(block.cases)} takes up to {_seconds([block])} s and a tree of "
                    f"{size:.1f} MiB; raise --total-minutes, --command-minutes or --size-mib"
                )
            calls.append([block])
            left -= _seconds([block])
        yield calls

    def _fits(self, blocks: Sequence[Block], sizes: dict[str, int], rest: int) -> bool:
        size = rest + sum(sizes[name] for name in needed_by(blocks))
        return _seconds(blocks) <= self.command and size <= self.size


def needed_by(blocks: Sequence[Block]) -> set[str]:
    """Return the checkpoints that these blocks read."""
    return {name for block in blocks for name in block.checkpoints}


def _seconds(blocks: Sequence[Block]) -> float:
    return MARGIN_SECONDS + sum(block.seconds for block in blocks)


def sizes_of_tree() -> tuple[dict[str, int], int]:
    """Return the bytes of each checkpoint by name, and the bytes of all other files.

    Files that git ignores do not count.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    sizes, rest = dict.fromkeys((*LLAMA, *QWEN), 0), 0
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        size = path.stat().st_size if path.is_file() else 0
        folder, _, inner = name.partition("/")
        checkpoint = inner.partition("/")[0]
        if folder == "checkpoints" and checkpoint in sizes:
            sizes[checkpoint] += size
        else:
            rest += size
    return sizes, rest


def command_of(blocks: Sequence[Block], options: str) -> str:
    """Return a shell line that runs the blocks, but stops once MAX_HUNG cases in a row hang."""
    run = (
        f"run() {{ [ $hung -ge {MAX_HUNG} ] && return; python benchmarks/gpu/run.py {options} "
        f'"$@"; s=$?; hung=$((s > {HUNG} ? hung + s - {HUNG} : 0)); }}; hung=0'
    )
    parts = [f"run --only {' '.join(block.cases)} --budget {block.seconds}" for block in blocks]
    return "; ".join([run, *parts])


def show(limits: Limits, output: str) -> Iterator[str]:
    """Yield the plan, as shell lines with comments."""
    sizes, rest = sizes_of_tree()
    commit = commit_of(ROOT).replace(" ", "-")  # ends in "-with-changes" if there are changes
    options = f"--commit {commit} --output {output}/gpu.jsonl --cache /tmp/gpu"
    for machine, calls in enumerate(limits.pack(sizes, rest), 1):
        seconds = START_SECONDS + sum(map(_seconds, calls))
        yield f"# Machine {machine}, up to {seconds / 60:.0f} minutes"
        for blocks in calls:
            needed = needed_by(blocks)
            size, away = rest + sum(sizes.values()), []
            for name in sorted(set(sizes) - needed, key=lambda name: -sizes[name]):
                if size > limits.size:
                    away.append(name)
                    size -= sizes[name]
            yield f"\n# A call of up to {_seconds(blocks):.0f} s, a tree of {size / MIB:.1f} MiB"
            if away:
                names = " ".join(f"checkpoints/{name}" for name in away)
                yield f"mkdir -p {LEFT_OUT} && mv {names} {LEFT_OUT}  # here, before the call"
            yield command_of(blocks, options)
            if away:
                yield f"mv {LEFT_OUT}/* checkpoints  # here, after it"
        yield ""


def dry_run(without: Sequence[str]) -> int:
    """Run the plan's blocks on this machine's CPU, and print the faults. Return 1 if there are any.

    Cases that cannot run on a CPU, and cases of the groups in `without`, are left out.
    """
    blocks = []
    for block in BLOCKS:
        cases = [case for case in select(list(block.cases)) if case.group not in without]
        names = tuple(case.name for case in cases if case.on_cpu)
        if names:
            blocks.append(Block(10 * block.seconds, names))
    with tempfile.TemporaryDirectory(prefix="gpu-plan-") as folder:
        options = f"--cpu --output {folder}/gpu.jsonl --cache {folder}/programs"
        command = command_of(blocks, options).replace("python ", f"{sys.executable} ", 1)
        # Times do not matter here, so the CPU's code may be slow.
        environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=True)
        wrong = report((Path(folder) / "gpu.jsonl").read_text().splitlines())
    print("\n".join(wrong) or "nothing is wrong")
    return len(wrong) > 0


def report(lines: Iterable[str]) -> list[str]:
    """Return the faults in the lines of a results file.

    Faults are cases that did not end as planned, failed checks, and errors.
    """
    found = []
    for line in map(json.loads, lines):
        reasons = [line["status"]] if line["status"] not in ("result", "done") else []
        reasons += [f"{name} is false" for name in HOLD if line.get(name) is False]
        if isinstance(line.get("error"), str):
            reasons.append(line["error"])
        if reasons:
            about = [line["case"], *(str(line[name]) for name in ABOUT if name in line)]
            found.append(f"{' '.join(about)}: {', '.join(reasons)}")
    return found


def main() -> int:
    """Print the plan or a report, or run the plan here."""
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--total-minutes", type=float, default=15.0, help="%(default)s")
    parser.add_argument("--command-minutes", type=float, default=10.0, help="%(default)s")
    parser.add_argument("--size-mib", type=float, default=64.0, help="of the tree; %(default)s")
    parser.add_argument(
        "--output", default="gpu-results", help="the folder there that comes back; %(default)s"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the faults in its lines")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on this CPU")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="GROUP", help="groups that a dry run leaves out"
    )
    settings = parser.parse_args()
    if settings.dry_run:
        return dry_run(settings.without)
    if settings.report:
        print("\n".join(report(settings.report.read_text().splitlines())) or "nothing is wrong")
        return 0
    limits = Limits(
        60 * settings.total_minutes, 60 * settings.command_minutes, MIB * settings.size_mib
    )
    try:
        print("\n".join(show(limits, settings.output)))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
