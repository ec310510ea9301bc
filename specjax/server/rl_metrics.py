"""Prometheus metrics for trainers: versions of weights, weight updates, pauses and sleep."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from specjax.server.control import Control
from specjax.server.families import Families

STATES = ("awake", "caches_freed", "weights_offloaded")  # index: the level of sleep


class RLMetrics(Collector):
    """Collects the metrics of weight updates, pauses and sleep."""

    def __init__(self, control: Control, families: Families):
        self._control, self._families = control, families

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus_client."""
        control, families = self._control, self._families
        operations, weights = control.operations, control.weights
        yield from families.gauges(
            {
                "specjax:weight_version": weights.version,
                "specjax:draft_weight_version": weights.drafter_version,
                "specjax:is_paused": float(control.is_paused),
                "vllm:rl_weight_update_operations_in_flight": operations.num_in_flight,
            }
        )
        yield from families.counters(
            {
                "specjax:pauses": operations.num_pauses,
                "specjax:paused_seconds": operations.paused_seconds,
            }
        )
        updates = operations.num_updates.items()
        yield families.counter_by("specjax:weight_updates", "weights", updates)
        yield families.histogram_by(
            "vllm:rl_weight_update_operation_duration_seconds",
            "Time of a door for weights, of calls that were not refused",
            "operation",
            dict(operations.durations),
        )
        levels = enumerate(STATES)
        states = [(state, float(control.sleep_level == level)) for level, state in levels]
        yield families.gauge_by("vllm:engine_sleep_state", "sleep_state", states)
