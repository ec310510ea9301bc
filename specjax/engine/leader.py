"""Runs an engine's programs in process 0, if several processes share the engine.

`LeaderPrograms` has the interface of `CompiledPrograms`, which it uses for the devices of this
process. Before each call, it sends the same call to the other processes (`follower.py`). A launch
is one message: the number of the program, and its packed arrays. Results stay on the devices of
each process. Results for the host are equal on all devices, so only process 0 reads them.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Drafter, Params, Variant
from specjax.device.layout import Layout
from specjax.device.models.model import Model
from specjax.device.placement import Placement
from specjax.device.verification import Verification
from specjax.engine.compiled import CompiledPrograms
from specjax.engine.hosts import Hosts, HostsError
from specjax.engine.metrics import Compilations
from specjax.engine.replay import measure_rounds
from specjax.engine.tracing import Program
from specjax.host.speculation.step_cost import StepCost


class Named(NamedTuple):
    """Names a program in a message by a number.

    The first message with this number also contains the program. In later messages, `program` is
    None.
    """

    number: int
    program: Program | None


class Result(NamedTuple):
    """Refers to the result of an earlier program, in a message to another process.

    `number` is the program's number. If `leaf` is not None, it selects one array of the result.
    Every process has kept its own part of the result.
    """

    number: int
    leaf: int | None


class _Follower:
    """The state of another process's programs, as far as process 0 knows it."""

    def __init__(self) -> None:
        self.ready: set[Program] = set()
        self.num_asked = 0  # messages that ask for programs, as far as the process has read them
        self.is_busy = False
        self.answers: list[str | None] = []  # to `elsewhere`: errors, or None


class LeaderPrograms:
    """Implements `Programs` on the devices of several processes.

    `make` makes the programs of one process, like `CompiledPrograms`.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Model,
        drafter: Drafter,
        verification: Verification,
        params: Params,
        layout: Layout,
        max_drafts: int,
        *,
        placement: Placement,
        hosts: Hosts,
        make: Callable[..., CompiledPrograms],
    ):
        self._hosts = hosts
        self._followers = {rank: _Follower() for rank in hosts.peers}
        self._failed: dict[Program, Exception] = {}
        self._numbers: dict[Program, int] = {}
        self._programs: list[Program] = []
        self._open: dict[int, Any] = {}  # results that later programs take, by program
        self._num_asked = 0
        self._ready: set[Program] = set()
        self._num_ready = -1  # sum over processes when `_ready` was computed
        self._heard = threading.Event()
        hosts.listen(partial(_hear_by, weakref.ref(self)))
        self._close_hosts = weakref.finalize(self, hosts.close)
        hosts.send("build", config, verification, layout, max_drafts)
        parts = config, target, drafter, verification, params, layout, max_drafts
        with hosts:
            self._own = make(*parts, placement=placement)

    @property
    def params(self) -> Params:
        """See `Programs`. Each array spans the devices of all processes."""
        return self._own.params

    @params.setter
    def params(self, params: Params) -> None:
        self._own.params = params

    @property
    def compilations(self) -> Compilations:
        """See `Programs`. Other processes' compilations are not counted."""
        return self._own.compilations

    @property
    def ready(self) -> Collection[Program]:
        """The programs that all processes have compiled."""
        each = [self._own.ready, *(one.ready for one in self._followers.values())]
        if (total := sum(map(len, each))) != self._num_ready:
            self._num_ready = total
            self._ready = set(list(each[0])).intersection(*map(list, each[1:]))
        return self._ready

    @property
    def failures(self) -> Mapping[Program, Exception]:
        """See `Programs`."""
        return {**self._own.failures, **self._failed}

    @property
    def num_processes(self) -> int:
        """See `Programs`."""
        return self._hosts.count

    def are_on_disk(self, programs: Iterable[Program]) -> bool:
        """See `Programs`."""
        return self._own.are_on_disk(programs)

    @property
    def is_compiling(self) -> bool:
        """See `Programs`."""
        return self._own.is_compiling or any(
            one.is_busy or one.num_asked < self._num_asked for one in self._followers.values()
        )

    @property
    def waits_at_conditionals(self) -> bool:
        """See `Programs`."""
        return self._own.waits_at_conditionals

    def max_deferred(self, batch: int) -> int:
        """See `Programs`."""
        return self._own.max_deferred(batch)

    def compile_ahead(
        self, programs: Iterable[Program], *, then: Iterable[Program] = (), show_progress: bool
    ) -> None:
        """See `Programs`."""
        programs, then = list(programs), list(then)
        self._ask("compile_ahead", programs, then)
        self._own.compile_ahead(programs, then=then, show_progress=show_progress)

        def are_there() -> bool:
            for program in programs:
                if program in self._failed:
                    raise self._failed[program]
            return all(program in self.ready for program in programs)

        self._hosts.wait(are_there, has_limit=False)

    def compile_behind(self, programs: Iterable[Program], *, is_urgent: bool) -> None:
        """See `Programs`."""
        programs = list(programs)
        self._ask("compile_behind", programs, is_urgent)
        self._own.compile_behind(programs, is_urgent=is_urgent)

    def finish(self, *, show_progress: bool) -> None:
        """See `Programs`."""
        self._ask("finish")
        self._own.finish(show_progress=show_progress)
        self._hosts.wait(lambda: not self.is_compiling, has_limit=False)

    def _ask(self, name: str, *arguments: Any) -> None:
        for program in (one for x in arguments if isinstance(x, list) for one in x):
            self._refuse_functions(program)
        named = [[*map(self._name, x)] if isinstance(x, list) else x for x in arguments]
        self._num_asked += 1
        self._hosts.send(name, *named)

    def _refuse_functions(self, program: Program) -> None:
        for part in (program, getattr(program, "variant", None)):
            if getattr(part, "processors", ()):
                raise NotImplementedError(
                    "logits_processors are functions of this process, and nnodes="
                    f"{self._hosts.count} processes run each step; leave them out (there "
                    "are logit_bias, bad_words and structured outputs), or use nnodes=1"
                )

    def _name(self, program: Program) -> Named:
        number = self._numbers.get(program)
        if number is not None:
            return Named(number, None)
        self._numbers[program] = number = len(self._programs)
        self._programs.append(program)
        return Named(number, program)

    def wait(self, seconds: float) -> None:
        """See `Programs`."""
        if self._own.is_compiling:
            self._own.wait(seconds)
        elif self.is_compiling:
            self._heard.wait(seconds)
            self._heard.clear()

    def run(self, program: Program, *arguments: Any) -> Any:
        """See `Programs`. All other processes launch the program at the same time."""
        self._hosts.check()
        if program not in self.ready:
            self.compile_ahead([program], show_progress=False)
        named = self._name(program)
        try:
            self._hosts.send("run", named, *map(self._sent, arguments))
            result = self._own.run(program, *arguments)
        except HostsError:
            raise
        except Exception as error:
            raise self._hosts.explain(error) from error
        except BaseException as interrupt:  # in between: the processes are out of step
            self._hosts.fail(repr(interrupt))
            raise
        if program.is_last:
            for argument in arguments:
                self._forget(argument)
            return jax.tree.map(lambda x: Awaited(x, self._hosts), result)
        if result is not None:
            self._open[named.number] = result
        return result

    def _sent(self, argument: Any) -> Any:
        """Return the form in which an argument is sent to the other processes.

        NumPy arrays are sent unchanged. A result of another program is replaced by a `Result`.
        """
        if argument is None or isinstance(argument, np.ndarray):
            return argument
        for number, result in self._open.items():
            if argument is result:
                return Result(number, None)
            for i, leaf in enumerate(jax.tree.leaves(result)):
                if argument is leaf:
                    return Result(number, i)
        raise AssertionError("an argument is not a result of a program")

    def _forget(self, argument: Any) -> None:
        """Forget a program's result if `argument` is this result or an array in it."""
        if argument is not None and not isinstance(argument, np.ndarray):
            for number, result in list(self._open.items()):
                if argument is result or any(argument is x for x in jax.tree.leaves(result)):
                    del self._open[number]

    def wait_for(self, result: Any) -> None:
        """See `Programs`."""
        leaves = jax.tree.leaves(result)
        self._hosts.wait(lambda: all(leaf.is_ready() for leaf in leaves))

    def elsewhere(self, function: Callable[..., Any], *arguments: Any) -> None:
        """See `Programs`."""
        followers = self._followers.values()
        self._hosts.send("call", function, *arguments)
        self._hosts.wait(lambda: all(one.answers for one in followers), has_limit=False)
        answers = [(rank, one.answers.pop()) for rank, one in self._followers.items()]
        for rank, error in answers:
            if error is not None:
                raise HostsError(f"{self._hosts.name(rank)}: {error}")

    def time_rounds(
        self, variant: Variant, ks: tuple[int, ...], batches: tuple[int, ...]
    ) -> StepCost:
        """See `Programs`."""
        own = self._own
        try:
            return measure_rounds(self, variant, own.layout, own.num_pages, ks, batches)
        finally:
            self.renew()

    def fill(self) -> None:
        """See `TimedPrograms`."""
        self._mirror("fill")

    def set_context(self, length: int) -> None:
        """See `TimedPrograms`."""
        self._mirror("set_context", length)

    def release(self) -> None:
        """See `Programs`."""
        self._mirror("release")

    def renew(self) -> None:
        """See `Programs`."""
        self._mirror("renew")

    def _mirror(self, name: str, *arguments: Any) -> None:
        """Call the method `name` of the programs in all processes, and drop earlier results.

        Do nothing if the engine has failed.
        """
        if self._hosts.error is None:
            self._open.clear()
            with self._hosts:
                self._hosts.send("mirror", name, *arguments)
                getattr(self._own, name)(*arguments)

    def close(self) -> None:
        """See `Programs`. The other processes close their programs, too."""
        self._close_hosts()
        if self._hosts.error is None:
            self._own.close()

    def _hear(self, rank: int, name: str, *content: Any) -> None:
        """Record a message from another process."""
        one = self._followers[rank]
        if name == "answer":
            one.answers.append(*content)
        elif name == "compiled":
            ready, failed, num_asked, one.is_busy = content
            for number, error in failed:
                program = self._programs[number]
                where = self._hosts.name(rank)
                self._failed[program] = HostsError(f"{where} cannot compile {program}: {error}")
            one.ready |= {self._programs[number] for number in ready}
            one.num_asked = num_asked
            self._heard.set()


def _hear_by(leader: weakref.ref[LeaderPrograms], *message: Any) -> None:
    """Pass a message to `leader`, unless the `LeaderPrograms` was freed."""
    if (found := leader()) is not None:
        found._hear(*message)


class Awaited:
    """A program's outputs for the host. Reading them raises a `HostsError` if a process is lost."""

    def __init__(self, array: jax.Array, hosts: Hosts):
        self._array: Any = array
        self._hosts = hosts

    def copy_to_host_async(self) -> None:
        """See `jax.Array`."""
        self._array.copy_to_host_async()

    def is_ready(self) -> bool:
        """See `jax.Array`."""
        return self._array.is_ready()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._hosts.wait(self._array.is_ready)
        try:
            return np.asarray(self._array, dtype)
        except Exception as error:
            raise self._hosts.explain(error) from error
