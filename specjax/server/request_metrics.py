"""The times and the numbers of draft tokens of one request, with the names in vLLM's responses."""

from typing import Any

from specjax.outputs import RequestMetrics
from specjax.server.settings import ServerSettings


def request_metrics(found: RequestMetrics, settings: ServerSettings, k: int) -> dict[str, Any]:
    """Return the metrics of a request, as far as the settings enable them.

    `k` is the maximum number of draft tokens per round.
    """
    metrics: dict[str, Any] = {}
    if settings.enable_per_request_metrics:
        metrics |= _times(found)
    kind = settings.per_request_spec_decode_metrics
    if kind != "none" and k:
        metrics["speculative_decoding"] = _drafts(found, k) | (
            _steps(found) if kind == "detailed" else {}
        )
    return metrics


def _times(found: RequestMetrics) -> dict[str, float | None]:
    started, first, last = found.scheduled_ts, found.first_token_ts, found.last_token_ts
    if started is None or first is None or last is None:
        return {}
    num_tokens, generating = found.num_generation_tokens, last - started
    return {
        "time_to_first_token_ms": 1e3 * (first - found.queued_ts),
        "generation_time_ms": 1e3 * generating,
        "queue_time_ms": 1e3 * (started - found.queued_ts),
        "mean_itl_ms": 1e3 * (last - first) / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / generating if generating else None,
    }


def _drafts(found: RequestMetrics, k: int) -> dict[str, Any]:
    """Return the acceptance rates of a request, and the counts from which they are computed.

    The counts are numbers of rounds, draft tokens and accepted draft tokens. Only rounds with
    drafts count. Each round yields its accepted draft tokens and one more token.
    """
    rounds = found.rounds
    num_drafts, num_accepted = (sum(pair[i] for pair in rounds) for i in range(2))
    histogram = [0] * (k + 1)
    for _, accepted in rounds:
        histogram[accepted] += 1
    return {
        "mean_acceptance_length": 1 + num_accepted / len(rounds) if rounds else None,
        "draft_acceptance_rate": num_accepted / num_drafts if num_drafts else None,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(rounds),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafts,
        "num_spec_tokens": k,
    }


def _steps(found: RequestMetrics) -> dict[str, list[int]]:
    return {
        "per_step_accepted": [accepted for _, accepted in found.rounds],
        "per_step_drafted": [drafts for drafts, _ in found.rounds],
    }
