"""Prometheus metrics with vLLM's names: the engine's counters, and times of requests.

Names of metrics that vLLM lacks begin with "specjax:".
"""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from specjax.async_llm import AsyncLLM
from specjax.engine.metrics import Metrics
from specjax.outputs import RequestOutput
from specjax.sampling_params import SamplingParams
from specjax.server.admission import Admission
from specjax.server.families import Families
from specjax.server.histogram import Histogram

_LONG = (10.0, 20.0, 40.0, 80.0)
_MIDDLE = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, *_MIDDLE, *_LONG, 160.0, 640.0, 2560.0)
# vLLM's buckets begin at 10 ms. With drafts, tokens can arrive in less time.
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


class Monitor(Collector):
    """Collects the metrics of a server.

    Attributes:
        families: the object that makes metrics with the labels of this server.
        registry: all collectors of the server's metrics, including this one.
    """

    def __init__(self, llm: AsyncLLM, model: str, admission: Admission):
        self._llm, self._admission = llm, admission
        self.families = Families({"model_name": model, "engine": "0"})
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.num_open = 0  # requests that are being answered
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def expose(self) -> bytes:
        """Return all metrics in Prometheus' text format. This can wait for the engine."""
        return generate_latest(self.registry)

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
        for name, (text, _) in HISTOGRAMS.items():
            yield self.families.histogram(f"vllm:{name}", text, self._histograms[name])

    def _engine_metrics(self, m: Metrics) -> Iterator[Metric]:
        families = self.families
        yield from families.gauges(
            {
                "vllm:num_requests_running": m.num_requests_running,
                "vllm:num_requests_waiting": m.num_requests_waiting,
                "vllm:kv_cache_usage_perc": m.kv_cache_usage,
                "specjax:num_compiling": m.num_compiling,
                "specjax:host_ms": m.host_ms,
                "specjax:wait_ms": m.wait_ms,
                "specjax:host_gap_ms": m.host_gap_ms,
            }
        )
        yield from families.counters(
            {
                "vllm:num_preemptions": m.num_preemptions,
                "vllm:prompt_tokens": m.num_prompt_tokens,
                "vllm:prompt_tokens_cached": m.prefix_cache_hits,
                "vllm:generation_tokens": m.num_generation_tokens,
                "vllm:prefix_cache_queries": m.prefix_cache_queries,
                "vllm:prefix_cache_hits": m.prefix_cache_hits,
                "vllm:spec_decode_num_drafts": m.num_drafts,
                "vllm:spec_decode_num_draft_tokens": m.num_draft_tokens,
                "vllm:spec_decode_num_accepted_tokens": m.num_accepted_tokens,
                "specjax:num_steps": m.num_steps,
                "specjax:prefix_cache_evictions": m.prefix_cache_evictions,
                "specjax:num_compiles_after_warmup": m.num_compiles_after_warmup,
                "specjax:host_seconds": m.host_ms * m.num_steps / 1e3,
                "specjax:wait_seconds": m.wait_ms * m.num_steps / 1e3,
            }
        )
        finished, refused = m.requests_finished.items(), self._admission.num_refused
        yield families.counter_by("vllm:request_success", "finished_reason", finished)
        yield families.counter_by("vllm:admission_rejections", "reason", [("queue_full", refused)])
        yield families.counter_by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "position",
            enumerate(m.num_accepted_tokens_per_pos),
        )
        yield families.counter_by("specjax:spec_decode_num_rounds", "k", m.k_histogram.items())
        requests = m.request_k_histogram.items()
        yield families.counter_by("specjax:spec_decode_num_request_rounds", "k", requests)
        for name in "drafts", "accepted_tokens":
            values = getattr(m, f"{name}_per_context").items()
            yield families.counter_by(f"specjax:spec_decode_{name}_per_context", "context", values)
        for name in "drafts", "draft_tokens", "accepted_tokens":
            values = getattr(m, f"{name}_per_source").items()
            yield families.counter_by(f"specjax:spec_decode_{name}_per_source", "source", values)
