"""Warns of drafters whose drafts are hardly ever accepted."""

from specjax.engine.log import get_log

NUM_DRAFTS = 1000  # number of draft tokens after which the rate is checked
LOWEST_RATE = 0.05
_CAUSES = (
    "Usual causes: the drafter was made for another model, or for this one before further "
    "training; an MTP module was quantised, or exported without its scales; an EAGLE-3 config "
    "counts layers as SGLang does (aux_id_convention='output'); or texts have another language or "
    "chat template than those of its training. `specjax info --check` finds some of them. Without "
    "drafts, decoding is faster"
)


class LowAcceptance:
    """Logs a warning if fewer than 5 % of 1,000 successive draft tokens are accepted.

    It warns only once.
    """

    def __init__(self):
        self._num_drafts = self._num_accepted = 0
        self._has_warned = False

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Count draft tokens and accepted draft tokens, and warn if necessary."""
        self._num_drafts += num_drafts
        self._num_accepted += num_accepted
        if self._num_drafts < NUM_DRAFTS:
            return
        rate, num_seen = self._num_accepted / self._num_drafts, self._num_drafts
        self._num_drafts = self._num_accepted = 0
        if rate < LOWEST_RATE and not self._has_warned:
            self._has_warned = True
            get_log(verbose=True).warning(
                "only %.1f%% of %d draft tokens were accepted. %s", 100 * rate, num_seen, _CAUSES
            )
