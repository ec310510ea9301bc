"""Peers (other engines) that run a whole batch at a time, each in a separate process."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from specjax.bench.environment import num_cpus
from specjax.bench.peers.peer import Work
from specjax.bench.traffic.record import Record

_ENDING_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class BatchPeer:
    """Another library, such as transformers, that generates text for a batch of prompts.

    Args:
        packages: what must be installed.
        remedy: how to install it.
        worker: the module to run. It reads a `Work` from stdin and writes results to stdout, as
            `transformers_worker` does.
        settings: fields that are added to the JSON of the `Work`, which the worker reads.
    """

    packages: tuple[str, ...]
    remedy: str
    worker: str
    settings: Mapping[str, Any]

    def check(self, name: str) -> None:
        """Raise a ValueError if a package is missing."""
        if missing := [one for one in self.packages if find_spec(one) is None]:
            raise ValueError(f"--against {name} needs the package {missing[0]}; {self.remedy}")

    @contextmanager
    def open(self, work: Work, seed: int) -> Iterator["PeerProcess"]:
        """Start the process and load the model; yield the process, and end it afterwards.

        Raises:
            ValueError: the process ended; the message has the last line that it wrote.
        """
        given = asdict(work) | {"seed": seed, "num_threads": num_cpus(), **self.settings}
        command = [sys.executable, "-m", self.worker]
        with (
            tempfile.TemporaryFile("w+") as log,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            ) as process,
        ):
            worker = PeerProcess(process, log)
            try:
                worker.version = worker.ask(json.dumps(given))["version"]
                yield worker
            finally:
                process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
                try:
                    process.wait(_ENDING_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()


class PeerProcess:
    """The process that runs another engine for `BatchPeer.open`.

    Attributes:
        version: the version of the engine.
    """

    def __init__(self, process: subprocess.Popen[str], log: Any):
        self._process, self._log = process, log
        self.version = ""

    def ask(self, line: str) -> dict[str, Any]:
        """Write a line to the process. Return the JSON object that the process writes back.

        Raises:
            ValueError: the process ended; the message has the last line that it wrote.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        answer = ""
        try:
            print(line, file=stdin, flush=True)
            answer = stdout.readline()
        except BrokenPipeError:
            pass
        if not answer:
            self._log.seek(0)
            lines = [one for one in self._log.read().splitlines() if one.strip()]
            raise ValueError(f"the peer's process ended: {(lines or ['it wrote nothing'])[-1]}")
        return json.loads(answer)

    def run(self) -> tuple[float, list[Record]]:
        """Run all prompts once. Return the seconds of this run, and a `Record` of each output."""
        found = self.ask("run")
        records = [
            Record(index=i, token_ids=ids, output_len=len(ids), latency=found["seconds"])
            for i, ids in enumerate(found["outputs"])
        ]
        return found["seconds"], records
