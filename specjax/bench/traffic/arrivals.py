"""When requests arrive: all at once, with gaps from a gamma distribution, or as in a trace.

The gamma distribution has the mean 1 / rate and the shape `burstiness`. The shape 1 makes the
arrivals a Poisson process. Smaller shapes make them burstier, larger ones more regular, and
infinity makes all gaps equal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

RAMPS = ("linear", "exponential")
_MIN_GAPS = 8  # fewer are too few for a test


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """When requests arrive.

    Args:
        rate: requests per second; infinity: all arrive at once.
        burstiness: shape of the gamma distribution; see the module's docstring.
        ramp: how the rate changes over the requests, one of `RAMPS`; None for a constant rate.
        start_rate, end_rate: rates at the first and the last request of a ramp.
        trace: the seconds at which requests arrive; then no other field may be set. None without a
            trace.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: str | None = None
    start_rate: float | None = None
    end_rate: float | None = None
    trace: Sequence[float] | None = None

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

        if self.trace is not None and (self.is_timed or self.burstiness != 1):
            raise ValueError(
                "--dataset-name trace has its own times; change them with --trace-speed, and leave "
                "out --request-rate, --burstiness and --ramp-up-strategy"
            )

    @property
    def is_timed(self) -> bool:
        """Whether requests arrive at a finite rate: neither all at once nor as in a trace."""
        return self.ramp is not None or self.rate != math.inf

    def rates(self, count: int) -> np.ndarray:
        """Return the arrival rate before each of `count` requests, in requests per second."""
        if self.ramp is None:
            return np.full(count, self.rate)
        start, end = self.start_rate or 0.0, self.end_rate or 0.0
        progress = np.arange(count) / max(1, count - 1)
        if self.ramp == "linear":
            return start + (end - start) * progress
        return start * (end / start) ** progress

    def times(self, count: int, seed: int) -> list[float]:
        """Return the seconds after the start at which `count` requests arrive. The first is 0."""
        if self.trace is not None:
            return list(self.trace[:count])
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
        """Compare the actual arrivals of a run with the planned arrivals.

        Args:
            times: seconds at which the requests arrived, in order.
            late: seconds by which each request was later than planned.

        Returns:
            None if all requests arrive at once, or if there are no requests. Otherwise the
            distribution, the p-value of a Kolmogorov-Smirnov test of the gaps, and the lateness. A
            p-value below about 0.001 means that the client could not send requests as planned. The
            p-value is None for a trace, for equal gaps, and for fewer than 8 gaps.
        """
        if not times or not (self.is_timed or self.trace is not None):
            return None
        lateness = {"mean_late_ms": 1e3 * float(np.mean(late)), "max_late_ms": 1e3 * max(late)}
        if self.trace is not None:
            return {"law": "trace", "p_value": None, **lateness}
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
            **lateness,
        }
