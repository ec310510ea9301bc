"""The port between an engine and a device.

The device holds the weights and the state between steps. `compiled.py` has the real one, which
compiles; anything that runs the same programs on the same packed arrays can replace it.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from specjax.device.drafters.drafter import Params, Variant
from specjax.engine.metrics import Compilations
from specjax.engine.tracing import Program
from specjax.host.speculation.step_cost import StepCost


class Programs(Protocol):
    """A device with an engine's weights and state, which its programs change in place."""

    @property
    def params(self) -> Params:
        """The weights in use."""
        ...

    @params.setter
    def params(self, params: Params) -> None: ...

    @property
    def compilations(self) -> Compilations:
        """What has been compiled so far."""
        ...

    @property
    def ready(self) -> Collection[Program]:
        """Programs that are compiled; never fewer than before."""
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
        """How many rounds of `batch` requests without drafts, `Joined` ones aside, may run before
        `Observe`; 0 if they leave nothing to it."""
        ...

    def compile_ahead(
        self, programs: Iterable[Program], *, then: Iterable[Program] = (), show_progress: bool
    ) -> None:
        """Return when all these are ready; `then` are compiled beside and after them.

        Raises:
            Exception: one of them does not compile.
        """
        ...

    def compile_behind(self, programs: Iterable[Program], *, is_urgent: bool) -> None:
        """Compile these in the background, in their order; urgent ones before all others."""
        ...

    def finish(self, *, show_progress: bool) -> None:
        """Wait until all programs that were asked for are compiled."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until another program is ready, nothing is left to compile, or the time is over."""
        ...

    def run(self, program: Program, *arguments: Any) -> Any:
        """Launch a program on the state, without waiting for it; compiles it if it is not ready.

        Arguments are results of programs, or NumPy arrays that nothing changes afterwards.
        Outputs have `copy_to_host_async` and `is_ready`, and are read as NumPy arrays.
        """
        ...

    def time_rounds(
        self, variant: Variant, ks: tuple[int, ...], batches: tuple[int, ...]
    ) -> StepCost:
        """Measure times of rounds of every shape by running them; the state is empty afterwards."""
        ...

    def release(self) -> None:
        """Free the memory of the state; nothing runs until `renew`."""
        ...

    def renew(self) -> None:
        """Begin with an empty state."""
        ...

    def close(self) -> None:
        """Free everything, the programs' code included; nothing runs afterwards."""
        ...
