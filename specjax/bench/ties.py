"""Distinguishes rounding differences from mismatches, for outputs of a server.

At temperature 0 the next token is the token with the highest logit. In float32, the logits of two
programs with different shapes differ by up to 4e-5. If the logits of the two best tokens are very
close (a near-tie), rounding can swap these tokens. Two outputs that diverge at a near-tie are both
greedy outputs of the model. The server must report log-probabilities, to show whether a difference
is a near-tie.
"""

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import aiohttp

from specjax.bench.result import NEAR_TIE
from specjax.bench.traffic.endpoint import Endpoint, open_session
from specjax.bench.traffic.record import Record

# Fields of requests that leave the best logit the best at temperature 0.
_GREEDY = (
    *("temperature", "top_p", "top_k", "min_p", "ignore_eos", "return_token_ids"),
    *("chat_template_kwargs", "num_speculative_tokens"),
)


def tell_ties(
    endpoint: Endpoint, pairs: Sequence[tuple[Record, Record]]
) -> tuple[list[str], list[str]]:
    """Return sentences about near-ties, and sentences about mismatches.

    `pairs` are outputs that differ. The first record of a pair has the expected tokens. The server
    is asked for the two best tokens at the first difference.
    """
    return asyncio.run(_tell_ties(endpoint, pairs))


async def _tell_ties(
    endpoint: Endpoint, pairs: Sequence[tuple[Record, Record]]
) -> tuple[list[str], list[str]]:
    ties, mismatches = [], []
    changed = [name for name in endpoint.fields if name not in _GREEDY]
    async with open_session(endpoint.headers) as session:
        for before, after in pairs:
            same = takewhile(
                lambda pair: pair[0] == pair[1],
                zip(before.token_ids, after.token_ids, strict=False),
            )
            place = sum(1 for _ in same)
            where = f"request {before.index} at output token {place}"
            if place == min(len(before.token_ids), len(after.token_ids)):
                lengths = f"lengths {len(before.token_ids)} and {len(after.token_ids)}"
                mismatches.append(f"{where}: {lengths}")
                continue
            pair = before.token_ids[place], after.token_ids[place]
            text = f"{where}: {pair[0]} and {pair[1]}"
            if endpoint.fields.get("temperature") or changed:
                why = ", ".join(changed) or "a temperature"
                mismatches.append(f"{text}; with {why}, near-ties are not looked for")
                continue
            best = await _two_best(session, endpoint, before, place)
            if best is None:
                mismatches.append(f"{text}; the server reports no scores there")
                continue
            gap = max(best.values()) - min(best.values())
            is_tie = set(pair) == set(best) and gap < NEAR_TIE
            kind = ties if is_tie else mismatches
            kind.append(f"{text}; the best are {list(best)}, {gap:.1e} apart")
    return ties, mismatches


async def _two_best(
    session: aiohttp.ClientSession, endpoint: Endpoint, record: Record, place: int
) -> dict[int, float] | None:
    """Return the two best tokens after an output's first `place` tokens, with log-probabilities.

    Return None if the server does not report them.
    """
    body = {
        "model": endpoint.model,
        "prompt": [*record.prompt_ids, *record.token_ids[:place]],
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        "num_speculative_tokens": 0,
    }
    if not record.prompt_ids:
        return None
    async with session.post(f"{endpoint.root}/v1/completions", json=body) as response:
        if response.status != 200:
            return None
        answer: Any = await response.json()
    top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    found = {int(name.removeprefix("token_id:")): value for name, value in top.items()}
    return dict(sorted(found.items(), key=lambda one: -one[1])[:2])
