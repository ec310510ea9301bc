"""The interface between an engine and a device.

The device holds the weights and the state between steps. `compiled.py` implements this interface
with JAX. Any class that runs the same programs on the same packed arrays can replace it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from specjax.device.drafters.drafter import Params, Variant
from specjax.engine.metrics import Compilations
from specjax.engine.tracing import Program
from specjax.host.speculation.step_cost import StepCost


class Programs(Protocol):
    """A device that holds an engine's weights and state. Programs change the state in place."""

    @property
    def params(self) -> Params:
        """The weights in use."""
        ...

    @params.setter
    def params(self, params: Params) -> None: ...

    @property
    def compilations(self) -> Compilations:
        """Counters of the programs compiled so far."""
        ...

    @property
    def ready(self) -> Collection[Program]:
        """The compiled programs. The collection only grows."""
        ...

    @property
    def failures(self) -> Mapping[Program, Exception]:
        """The exceptions of programs that do not compile."""
        ...

    @property
    def num_processes(self) -> int:
        """The number of processes that run the programs together."""
        ...

    def are_on_disk(self, programs: Iterable[Program]) -> bool:
        """Return whether all of `programs` that are not ready can be read from disk.

        To read a program takes much less time than to compile it.
        """
        ...

    @property
    def is_compiling(self) -> bool:
        """Whether programs are being compiled."""
        ...

    @property
    def waits_at_conditionals(self) -> bool:
        """Whether the host waits for the device at each conditional that contains a collective.

        If the host waits, requests that need no optional work, such as log-probabilities, run in
        programs without these conditionals; see `Variant.is_plain`.
        """
        ...

    def max_deferred(self, batch: int) -> int:
        """Return the maximum number of rounds whose hidden states the drafter can read later.

        These rounds have no drafts, and `batch` requests each. The drafter reads the hidden states
        of all these rounds at once, in the program `Observe`. Return 0 if the drafter must read the
        hidden states at the end of each round. If a round and prefill chunks run as one program
        (`Joined`), the drafter always reads the round's hidden states at the end of this program.
        """
        ...

    def compile_ahead(
        self, programs: Iterable[Program], *, then: Iterable[Program] = (), show_progress: bool
    ) -> None:
        """Compile `programs`, and wait until they are ready.

        The programs in `then` are compiled in the background. The call does not wait for them.

        Raises:
            Exception: one of `programs` failed to compile.
        """
        ...

    def compile_behind(self, programs: Iterable[Program], *, is_urgent: bool) -> None:
        """Compile programs in the background, in order.

        `is_urgent` means that requests wait for these programs. Such programs are compiled before
        all others.
        """
        ...

    def finish(self, *, show_progress: bool) -> None:
        """Wait until no program is left to compile."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until another program is ready, or none is left to compile, or the time is over."""
        ...

    def run(self, program: Program, *arguments: Any) -> Any:
        """Launch a program on the state without waiting for its result. Compile it if necessary.

        `arguments` are results of other programs, or NumPy arrays that must not change afterwards.
        Results for the host have the methods `copy_to_host_async` and `is_ready`, and can be
        converted to NumPy arrays.
        """
        ...

    def wait_for(self, result: Any) -> None:
        """Wait until the device has computed the arrays that a program returned."""
        ...

    def elsewhere(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in all other processes that run the same programs, and wait for its end.

        Each process calls `function(follower, *arguments)` with its `Follower`. The function must
        be importable there.

        Raises:
            HostsError: the function failed in a process, or a process is lost.
        """
        ...

    def time_rounds(
        self, variant: Variant, ks: tuple[int, ...], batches: tuple[int, ...]
    ) -> StepCost:
        """Run rounds for every pair of a K in `ks` and a batch size in `batches`; return the times.

        The state is empty afterwards.
        """
        ...

    def release(self) -> None:
        """Free the memory of the state. Run no program until `renew`."""
        ...

    def renew(self) -> None:
        """Create an empty state."""
        ...

    def close(self) -> None:
        """Free all memory, including the programs' code. Run no program afterwards."""
        ...
