"""Rounds without drafts that the drafter has still to observe, see `device/deferral.py`."""

import numpy as np

from specjax.device.inputs import DecodeInputs
from specjax.device.layout import Layout
from specjax.engine.batch import Part
from specjax.engine.port import Programs
from specjax.engine.programs import Observe
from specjax.host.plans import PrefillPlan


class DeferredRounds:
    """Counts rounds of the same requests; runs `Observe` before anything else may run.

    Another step may draft, or use pages that requests have given back.
    """

    def __init__(self, programs: Programs, layout: Layout):
        self._programs, self._layout = programs, layout
        self._last: np.ndarray | None = None  # packed
        self._count = 0

    def prepare_for(self, plan: Part, packed: np.ndarray) -> None:
        """Observe what must be before `plan` runs; then count it, if it will leave something."""
        has_drafts = isinstance(plan, PrefillPlan) or plan.k > 0
        most = 0 if has_drafts else self._programs.max_deferred(plan.batch)
        if self._count >= most or not self._has_rows_of(packed):
            self.observe()
        if most:
            self._last, self._count = packed, self._count + 1

    def observe(self) -> None:
        """Let the drafter observe all."""
        last, self._last, self._count = self._last, None, 0
        if last is not None:
            self._programs.run(Observe(len(last)), last)

    def _has_rows_of(self, packed: np.ndarray) -> bool:
        """Whether a packed round has the same requests in the same rows as those before."""
        if self._last is None:
            return False
        views = self._layout.packing(DecodeInputs).views
        return np.array_equal(views(packed).slots, views(self._last).slots)
