"""The interface between an engine and a device.

The device holds the weights and the state between steps. `compiled.py` implements it with JAX;
anything that runs the same programs on the same packed arrays can replace it.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from specjax.device.drafters.drafter import Params, Variant
from specjax.engine.metrics import Compilations
from specjax.engine.tracing import Program
from specjax.host.speculation.step_cost import StepCost


class Programs(Protocol):
    """A device that holds an engine's weights and state; programs change the state in place."""

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
    def is_compiling(self) -> bool:
        """Whether programs are being compiled."""
        ...

    def max_deferred(self, batch: int) -> int:
        """Return how many rounds without drafts, of `batch` requests, may run before `Observe`.

        Returns 0 if the drafter observes each round at once, as it always does in `Joined`.
        """
        ...

    def compile_ahead(
        self, programs: Iterable[Program], *, then: Iterable[Program] = (), show_progress: bool
    ) -> None:
        """Compile `programs` and wait for them; compile `then` meanwhile and afterwards.

        Raises:
            Exception: one of `programs` failed to compile.
        """
        ...

    def compile_behind(self, programs: Iterable[Program], *, is_urgent: bool) -> None:
        """Compile programs in the background, in order; urgent ones before all others."""
        ...

    def finish(self, *, show_progress: bool) -> None:
        """Wait until all programs that were asked for are compiled."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until another program is ready, none is left to compile, or the time is over."""
        ...

    def run(self, program: Program, *arguments: Any) -> Any:
        """Launch a program on the state without waiting for it; compile it first if necessary.

        Arguments are results of programs, or NumPy arrays that must not change afterwards. Outputs
        have `copy_to_host_async` and `is_ready`, and are read as NumPy arrays.
        """
        ...

    def time_rounds(
        self, variant: Variant, ks: tuple[int, ...], batches: tuple[int, ...]
    ) -> StepCost:
        """Measure times of rounds of every shape by running them; leave an empty state."""
        ...

    def release(self) -> None:
        """Free the memory of the state; no program may run until `renew`."""
        ...

    def renew(self) -> None:
        """Create an empty state."""
        ...

    def close(self) -> None:
        """Free all memory, including the programs' code; no program may run afterwards."""
        ...
