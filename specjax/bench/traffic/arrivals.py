"""When requests arrive: at once, or at a rate whose gaps follow a gamma distribution.

The gaps have the mean 1 / rate and the shape `burstiness`: 1 is a Poisson process, smaller values
are burstier, larger ones more even, and infinity is a constant gap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

RAMPS = ("linear", "exponential")
_MIN_GAPS = 8  # a test of fewer gaps says nothing


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The law of arrivals.

    Args:
        rate: requests per second; infinity for all at once.
        burstiness: see the module.
        ramp: how the rate changes over the requests, one of `RAMPS`; None for a constant rate.
        start_rate, end_rate: rates at the first and the last request of a ramp.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: str | None = None
    start_rate: float | None = None
    end_rate: float | None = None

    def __post_init__(self):
        if not self.rate > 0:
            raise ValueError(f"--request-rate {self.rate:g} must be above 0; inf sends all at once")
        if not self.burstiness > 0:
            raise ValueError(f"--burstiness {self.burstiness:g} must be above 0; 1 is Poisson")
        ends = {"--ramp-up-start-rps": self.start_rate, "--ramp-up-end-rps": self.end_rate}
        for name, value in ends.items():
            if self.ramp is None and value is not None:
                raise ValueError(f"{name} {value:g} goes with --ramp-up-strategy, which is missing")
            if self.ramp is not None and (value is None or not 0 < value < math.inf):
                raise ValueError(f"{name} {value} must be a rate above 0, in requests per second")
        if self.ramp is not None and self.rate != math.inf:
            raise ValueError(
                f"--request-rate {self.rate:g} contradicts --ramp-up-strategy {self.ramp}; leave "
                "out one of them"
            )

    @property
    def is_timed(self) -> bool:
        """Whether requests arrive over time, and not all at once."""
        return self.ramp is not None or self.rate != math.inf

    def rates(self, count: int) -> np.ndarray:
        """Return the rate before each of `count` requests, in requests per second."""
        if self.ramp is None:
            return np.full(count, self.rate)
        start, end = self.start_rate or 0.0, self.end_rate or 0.0
        progress = np.arange(count) / max(1, count - 1)
        if self.ramp == "linear":
            return start + (end - start) * progress
        return start * (end / start) ** progress

    def times(self, count: int, seed: int) -> list[float]:
        """Return the seconds after the start at which `count` requests arrive. The first is 0."""
        if not self.is_timed:
            return [0.0] * count
        gaps = np.ones(count)
        if self.burstiness != math.inf:
            shape = self.burstiness
            gaps = np.random.default_rng(seed % 2**64).gamma(shape, 1 / shape, count)
        gaps = gaps / self.rates(count)
        gaps[0] = 0.0
        return np.cumsum(gaps).tolist()

    def check(self, times: Sequence[float], late: Sequence[float]) -> dict[str, Any] | None:
        """Compare the arrivals of a run with the law.

        Args:
            times: seconds at which requests arrived, in the order of the requests.
            late: seconds by which each was later than it should have been.

        Returns:
            The law, the p-value of a Kolmogorov-Smirnov test of the gaps, and the lateness; None
            if all requests arrive at once. A p-value below about 0.001 means that the client did
            not keep to the law. It is None for few or constant gaps.
        """
        if not self.is_timed or not times:
            return None
        gaps = np.diff(times) * self.rates(len(times))[1:]
        p_value = None
        if len(gaps) >= _MIN_GAPS and self.burstiness != math.inf:
            shape = self.burstiness
            p_value = float(stats.kstest(gaps, stats.gamma(shape, scale=1 / shape).cdf).pvalue)
        return {
            "law": "gamma" if self.burstiness != math.inf else "constant",
            "burstiness": self.burstiness if self.burstiness != math.inf else "inf",
            "mean_gap_over_law": float(gaps.mean()) if len(gaps) else None,
            "p_value": p_value,
            "mean_late_ms": 1e3 * float(np.mean(late)),
            "max_late_ms": 1e3 * float(np.max(late)),
        }
