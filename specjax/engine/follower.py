"""Runs an engine's programs in each process but process 0, if several processes share the engine.

Process 0 runs `leader.py` and sends a message for each call.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.layout import Layout
from specjax.device.models.model import Model
from specjax.device.placement import Placement
from specjax.device.verification import Verification
from specjax.engine.compiled import CompiledPrograms
from specjax.engine.hosts import Hosts, HostsError
from specjax.engine.leader import Named, Result
from specjax.engine.sleep import Sleep
from specjax.engine.tracing import Program
from specjax.host.leaving import leave

log = logging.getLogger(__name__)


class Follower:
    """Runs the calls that process 0 sends, until process 0 closes its LLM.

    Each message has the name of a `Follower` method, and the arguments for it.

    Attributes:
        programs: the programs of this process.
        sleep: moves this process's weights to the host and back.
        staged: values, such as new weights. One function that `Programs.elsewhere` calls stores
            them here, and a later function uses them.
    """

    programs: CompiledPrograms

    def __init__(
        self,
        hosts: Hosts,
        target: Model,
        drafter: Drafter,
        params: Params,
        placement: Placement,
        make: Callable[..., CompiledPrograms],
    ):
        self.target, self.drafter = target, drafter
        self.sleep = Sleep(self)
        self.staged: Any = ()
        self._hosts, self._params, self._placement, self._make = hosts, params, placement, make
        self._known: list[Program] = []
        self._results: dict[int, Any] = {}
        self._num_asked = 0
        self._asked = threading.Event()
        self._is_over = False

    def follow(self) -> None:
        """Run the calls that process 0 sends, until process 0 sends "end".

        If process 0 is exiting and threads of this process still compile programs, this process
        ends at once, with exit code 0.

        Raises:
            HostsError: process 0 ended without sending "end", or a process failed.
        """
        self._hosts.runs = True
        threading.Thread(target=self._report, name="specjax-hosts", daemon=True).start()
        try:
            with self._hosts:
                while (message := self._hosts.receive())[0] != "end":
                    getattr(self, message[0])(*message[1:])
        finally:
            self._is_over = True
            self._asked.set()
        self._hosts.close()
        _, is_ending = message
        if is_ending:
            leave(self.programs.close, log.info)
        else:
            self.programs.close()

    @property
    def params(self) -> Params:
        """The weights in use."""
        return self.programs.params

    @params.setter
    def params(self, params: Params) -> None:
        self.programs.params = params

    def release(self) -> None:
        """Do nothing: process 0 sends a separate message that frees this process's state."""

    def renew(self) -> None:
        """Do nothing: process 0 sends a separate message that makes an empty state here."""

    def build(
        self, config: EngineConfig, verification: Verification, layout: Layout, max_drafts: int
    ) -> None:
        """Make `programs`, the `CompiledPrograms` of this process."""
        parts = config, self.target, self.drafter, verification, self._params, layout, max_drafts
        self.programs = self._make(*parts, placement=self._placement)
        del self._params

    def compile_ahead(self, programs: list[Named], then: list[Named]) -> None:
        """See `Programs`. If a program fails to compile, `_report` tells process 0."""
        wanted, later = [*map(self._find, programs)], [*map(self._find, then)]
        try:
            self.programs.compile_ahead(wanted, then=later, show_progress=False)
        except Exception:
            if not any(program in self.programs.failures for program in wanted):
                raise
        self._count()

    def compile_behind(self, programs: list[Named], is_urgent: bool) -> None:
        """See `Programs`."""
        self.programs.compile_behind([*map(self._find, programs)], is_urgent=is_urgent)
        self._count()

    def finish(self) -> None:
        """See `Programs`."""
        self.programs.finish(show_progress=False)
        self._count()

    def run(self, named: Named, *arguments: Any) -> None:
        """See `Programs`. Keep the result until the step's last program has taken it."""
        program = self._find(named)
        taken = [self._result(x) if isinstance(x, Result) else x for x in arguments]
        result = self.programs.run(program, *taken)
        if program.is_last:
            for one in arguments:
                if isinstance(one, Result):
                    self._results.pop(one.number, None)
        elif result is not None:
            self._results[named.number] = result

    def mirror(self, name: str, *arguments: Any) -> None:
        """Call the method `name` of `programs`, after dropping the results that `run` has kept."""
        self._results.clear()
        getattr(self.programs, name)(*arguments)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call `function(self, *arguments)`, and send its error, or None, to process 0."""
        error = None
        try:
            function(self, *arguments)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        self._hosts.send("answer", error)

    def ping(self) -> None:
        """Tell process 0 that this process is alive."""
        self._hosts.send("alive")

    def _find(self, named: Named) -> Program:
        if named.program is not None:
            assert named.number == len(self._known)
            self._known.append(named.program)
        return self._known[named.number]

    def _result(self, named: Result) -> Any:
        result = self._results[named.number]
        return result if named.leaf is None else jax.tree.leaves(result)[named.leaf]

    def _count(self) -> None:
        self._num_asked += 1
        self._asked.set()

    def _report(self) -> None:
        """While programs are being compiled, tell process 0 which are ready or have failed."""
        told: set[Program] = set()
        while self._asked.wait() and not self._is_over:
            self._asked.clear()
            is_busy = True
            while is_busy and not self._is_over:
                num_asked, is_busy = self._num_asked, self.programs.is_compiling
                known = {program: i for i, program in enumerate(self._known)}
                ready = [p for p in list(self.programs.ready) if p in known and p not in told]
                failures = dict(self.programs.failures)
                failed = [p for p in failures if p in known and p not in told]
                told |= {*ready, *failed}
                content = [known[p] for p in ready], [(known[p], str(failures[p])) for p in failed]
                with suppress(HostsError):  # `follow` raises it
                    self._hosts.send("compiled", *content, num_asked, is_busy)
                if is_busy:
                    self.programs.wait(0.5)
