"""Prometheus metrics with vLLM's names: the engine's counters, and times of requests.

Counters that vLLM lacks begin with "specjax:".
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from specjax.async_llm import AsyncLLM
from specjax.engine.metrics import Metrics
from specjax.outputs import RequestOutput
from specjax.sampling_params import SamplingParams
from specjax.server.admission import Admission

_LONG = (10.0, 20.0, 40.0, 80.0)
_MIDDLE = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, *_MIDDLE, *_LONG, 160.0, 640.0, 2560.0)
# vLLM's begin at 10 ms. With drafts, several tokens arrive in less.
ITL = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075)
ITL = (*ITL, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, *_LONG)
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
LATENCY = (*LATENCY, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to the first token", TTFT),
    "inter_token_latency_seconds": ("Time between two chunks of a stream", ITL),
    "request_time_per_output_token_seconds": ("Time per token after the first", ITL),
    "e2e_request_latency_seconds": ("Time of a request", LATENCY),
    "request_queue_time_seconds": ("Time before the first step", LATENCY),
    "request_inference_time_seconds": ("Time from the first step to the last token", LATENCY),
    "request_prefill_time_seconds": ("Time from the first step to the first token", LATENCY),
    "request_decode_time_seconds": ("Time from the first token to the last", LATENCY),
    "request_prompt_tokens": ("Tokens of the prompt", TOKENS),
    "request_generation_tokens": ("Generated tokens", TOKENS),
    "request_params_n": ("Samples per prompt", SAMPLES),
    "request_params_max_tokens": ("Maximum number of tokens", TOKENS),
}


class Histogram:
    """Counts values by bucket. It is not thread-safe, and is used only on the event loop."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative counts by upper bound, and the sum of all values."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return buckets, self._sum


class Monitor(Collector):
    """Collects the metrics of a server."""

    def __init__(self, llm: AsyncLLM, model: str, admission: Admission):
        self._llm, self._admission = llm, admission
        self._labels = {"model_name": model, "engine": "0"}
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.num_open = 0  # requests that are being answered
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def expose(self) -> bytes:
        """Return all metrics in Prometheus' text format. May wait for the engine."""
        return generate_latest(self._registry)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._histograms[name].observe(value)

    def finish(self, output: RequestOutput, params: SamplingParams) -> None:
        """Add a finished request to the histograms."""
        times, observe = output.metrics, self.observe
        observe("request_params_n", params.n)
        if params.max_tokens is not None:
            observe("request_params_max_tokens", params.max_tokens)
        observe("request_prompt_tokens", len(output.prompt_token_ids))
        if times is None:
            return
        observe("request_generation_tokens", times.num_generation_tokens)
        observe("e2e_request_latency_seconds", time.monotonic() - times.queued_ts)
        started, first, last = times.scheduled_ts, times.first_token_ts, times.last_token_ts
        if started is None or first is None or last is None:
            return
        observe("time_to_first_token_seconds", first - times.queued_ts)
        observe("request_queue_time_seconds", started - times.queued_ts)
        observe("request_prefill_time_seconds", first - started)
        observe("request_decode_time_seconds", last - first)
        observe("request_inference_time_seconds", last - started)
        num_later = times.num_generation_tokens / params.n - 1
        if num_later > 0:
            observe("request_time_per_output_token_seconds", (last - first) / num_later)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus_client."""
        yield from self._engine_metrics(self._llm.metrics())
        labels, values = list(self._labels), list(self._labels.values())
        for name, (text, _) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=labels)
            buckets, total = self._histograms[name].read()
            family.add_metric(values, buckets, total)
            yield family

    def _engine_metrics(self, m: Metrics) -> Iterator[Metric]:
        labels, values = list(self._labels), list(self._labels.values())
        gauges = {
            "num_requests_running": m.num_requests_running,
            "num_requests_waiting": m.num_requests_waiting,
            "kv_cache_usage_perc": m.kv_cache_usage,
        }
        counters = {
            "num_preemptions": m.num_preemptions,
            "prompt_tokens": m.num_prompt_tokens,
            "prompt_tokens_cached": m.prefix_cache_hits,
            "generation_tokens": m.num_generation_tokens,
            "prefix_cache_queries": m.prefix_cache_queries,
            "prefix_cache_hits": m.prefix_cache_hits,
            "spec_decode_num_drafts": m.num_drafts,
            "spec_decode_num_draft_tokens": m.num_draft_tokens,
            "spec_decode_num_accepted_tokens": m.num_accepted_tokens,
        }
        compiling = GaugeMetricFamily("specjax:num_compiling", "being compiled", labels=labels)
        compiling.add_metric(values, m.num_compiling)
        yield compiling
        for name, value in gauges.items():
            family = GaugeMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=labels)
            family.add_metric(values, value)
            yield family
        for name, value in counters.items():
            family = CounterMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=labels)
            family.add_metric(values, value)
            yield family
        rounds = CounterMetricFamily(
            "specjax:spec_decode_num_rounds", "rounds by K", labels=[*labels, "k"]
        )
        for k, count in m.k_histogram.items():
            rounds.add_metric([*values, str(k)], count)
        yield rounds
        own = {
            "num_steps": m.num_steps,
            "num_compiles_after_warmup": m.num_compiles_after_warmup,
            "host_seconds": m.host_ms * m.num_steps / 1e3,
            "wait_seconds": m.wait_ms * m.num_steps / 1e3,
        }
        for name, value in own.items():
            family = CounterMetricFamily(f"specjax:{name}", name.replace("_", " "), labels=labels)
            family.add_metric(values, value)
            yield family
        labelled = {
            "request_success": ("finished_reason", m.requests_finished.items()),
            "admission_rejections": ("reason", [("queue_full", self._admission.num_refused)]),
            "spec_decode_num_accepted_tokens_per_pos": (
                "position",
                enumerate(m.num_accepted_tokens_per_pos),
            ),
        }
        for name, (label, pairs) in labelled.items():
            text = name.replace("_", " ")
            family = CounterMetricFamily(f"vllm:{name}", text, labels=[*labels, label])
            for key, value in pairs:
                family.add_metric([*values, str(key)], value)
            yield family
