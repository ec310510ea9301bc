"""Counts deferred rounds: rounds without drafts, whose hidden states the drafter reads later.

`device/deferral.py` explains why the drafter does not read the hidden states in each round.
"""

import numpy as np

from specjax.device.inputs import DecodeInputs
from specjax.device.layout import Layout
from specjax.engine.batch import Part
from specjax.engine.port import Programs
from specjax.engine.programs import Observe
from specjax.host.plans import PrefillPlan


class DeferredRounds:
    """Counts deferred rounds: they have no drafts, and the drafter reads their hidden states later.

    All deferred rounds have the same requests. In the program `Observe`, the drafter reads the
    hidden states of all deferred rounds at once. The program must run before a step that drafts. It
    must also run before a step with other requests, because new requests may reuse the pages of
    requests that have ended.
    """

    def __init__(self, programs: Programs, layout: Layout):
        self._programs, self._layout = programs, layout
        self._last: np.ndarray | None = None  # the last deferred round, packed
        self._count = 0

    def prepare_for(self, plan: Part, packed: np.ndarray) -> None:
        """Run the program `Observe` before the step `plan` if deferred rounds cannot wait longer.

        A deferred round is a round whose hidden states the drafter has not read yet. In `Observe`,
        the drafter reads them. Deferred rounds can wait if `plan` is a round without drafts for the
        same requests, and fewer than `Programs.max_deferred` rounds are deferred.

        Finally, `plan` is counted as deferred if it has no drafts and `max_deferred` is not 0.
        `packed` is the packed plan.
        """
        has_drafts = isinstance(plan, PrefillPlan) or plan.k > 0
        most = 0 if has_drafts else self._programs.max_deferred(plan.batch)
        if self._count >= most or not self._has_rows_of(packed):
            self.observe()
        if most:
            self._last, self._count = packed, self._count + 1

    def observe(self) -> None:
        """Let the drafter read the hidden states of all deferred rounds now.

        A deferred round is a round whose hidden states the drafter has not read yet.
        """
        last, self._last, self._count = self._last, None, 0
        if last is not None:
            self._programs.run(Observe(len(last)), last)

    def _has_rows_of(self, packed: np.ndarray) -> bool:
        """Return whether each row of a round has the same request as in the last deferred round."""
        if self._last is None:
            return False
        views = self._layout.packing(DecodeInputs).views
        return np.array_equal(views(packed).slots, views(self._last).slots)
