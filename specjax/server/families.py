"""Makes metrics for prometheus_client. Each metric has the labels of the server."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from specjax.server.histogram import Histogram


class Families:
    """Makes metrics with names like "vllm:num_preemptions".

    Names of counters are given without their ending "_total".

    Args:
        labels: the labels of every metric, and their values.
    """

    def __init__(self, labels: Mapping[str, str]):
        self._names, self._values = list(labels), list(labels.values())

    def gauges(self, values: Mapping[str, float]) -> Iterator[Metric]:
        """Yield a gauge for each pair of a name and a value."""
        for name, value in values.items():
            yield self._of(GaugeMetricFamily, name, [((), value)])

    def counters(self, values: Mapping[str, float]) -> Iterator[Metric]:
        """Yield a counter for each pair of a name and a value."""
        for name, value in values.items():
            yield self._of(CounterMetricFamily, name, [((), value)])

    def gauge_by(self, name: str, label: str, values: Iterable[tuple[Any, float]]) -> Metric:
        """Return a gauge with the additional label `label`.

        `values` has pairs (value of the label, value of the gauge).
        """
        pairs = [((str(key),), value) for key, value in values]
        return self._of(GaugeMetricFamily, name, pairs, label)

    def counter_by(self, name: str, label: str, values: Iterable[tuple[Any, float]]) -> Metric:
        """Return a counter with an additional label; see `gauge_by`."""
        pairs = [((str(key),), value) for key, value in values]
        return self._of(CounterMetricFamily, name, pairs, label)

    def histogram(self, name: str, text: str, values: Histogram) -> Metric:
        """Return a histogram named `name`, with the help text `text`."""
        family = HistogramMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, *values.read())
        return family

    def histogram_by(
        self, name: str, text: str, label: str, values: Mapping[str, Histogram]
    ) -> Metric:
        """Return a histogram with the additional label `label`.

        `values` has a histogram for each value of the label.
        """
        family = HistogramMetricFamily(name, text, labels=[*self._names, label])
        for key, one in values.items():
            family.add_metric([*self._values, key], *one.read())
        return family

    def _of(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        pairs: Iterable[tuple[tuple[str, ...], float]],
        *labels: str,
    ) -> Metric:
        text = name.partition(":")[2].replace("_", " ")
        family = kind(name, text, labels=[*self._names, *labels])
        for keys, value in pairs:
            family.add_metric([*self._values, *keys], value)
        return family
