"""Lists an engine's metrics in the form that vLLM's `get_metrics` returns."""

from dataclasses import dataclass, field

from specjax.engine.metrics import Metrics


@dataclass(frozen=True)
class Counter:
    """A number that only grows."""

    name: str
    value: int
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gauge:
    """A number that may rise and fall."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Vector:
    """A list of numbers that only grow, with one number per draft position."""

    name: str
    values: list[int]
    labels: dict[str, str] = field(default_factory=dict)


Metric = Counter | Gauge | Vector


def list_metrics(m: Metrics) -> list[Metric]:
    """Return the metrics that vLLM also has, under vLLM's names."""
    return [
        Gauge("vllm:num_requests_running", m.num_requests_running),
        Gauge("vllm:num_requests_waiting", m.num_requests_waiting),
        Gauge("vllm:kv_cache_usage_perc", m.kv_cache_usage),
        Counter("vllm:num_preemptions", m.num_preemptions),
        Counter("vllm:prefix_cache_queries", m.prefix_cache_queries),
        Counter("vllm:prefix_cache_hits", m.prefix_cache_hits),
        Counter("vllm:prompt_tokens", m.num_prompt_tokens),
        Counter("vllm:generation_tokens", m.num_generation_tokens),
        *(
            Counter("vllm:request_success", count, {"finished_reason": reason})
            for reason, count in m.requests_finished.items()
        ),
        Counter("vllm:spec_decode_num_drafts", m.num_drafts),
        Counter("vllm:spec_decode_num_draft_tokens", m.num_draft_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", m.num_accepted_tokens),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", list(m.num_accepted_tokens_per_pos)),
    ]
