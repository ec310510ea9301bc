"""An oracle for stop strings: it decodes every prefix, and cuts at the first stop string."""

from dataclasses import dataclass

import numpy as np
from support.engines import generate

from specjax import SamplingParams

FREE = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@dataclass(frozen=True)
class Long:
    """An output that no stop condition has ended."""

    prompt: list
    params: SamplingParams
    token_ids: list
    runs: list  # tokens per step


def run_on(llm, prompts, params):
    """Return outputs of maximum length, each with its number of tokens per step."""
    runs = watch_runs(llm.engine.scheduler)
    outputs = generate(llm, prompts, params)
    del llm.engine.scheduler.commit
    longs = []
    for output, one in zip(outputs, params, strict=True):
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) == one.max_tokens
        longs.append(Long(output.prompt_token_ids, one, token_ids, runs[output.request_id]))
    assert all(sum(long.runs) == len(long.token_ids) for long in longs)
    return longs


def watch_runs(scheduler):
    """Record the number of tokens per step of each request, by the request's id.

    Delete `scheduler.commit` to end the recording.
    """
    runs = {}
    commit = scheduler.commit

    def watched(plan, outputs):
        for sequence, row in zip(plan.sequences, outputs, strict=True):
            if row.tokens and not sequence.is_finished:
                runs.setdefault(sequence.request.request_id, []).append(len(row.tokens))
        return commit(plan, outputs)

    scheduler.commit = watched
    return runs


def cut(tokenizer, token_ids, stop, *, min_tokens=0, include=False):
    """Return the tokens, the text and the stop string of an output, by brute force.

    The stop string is None if there is none in the output.
    """
    before = ""
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count]).removesuffix("\N{REPLACEMENT CHARACTER}")
        ends = [
            (start, -len(word), word)
            for word in stop
            for start in range(len(text))
            if text.startswith(word, start) and start + len(word) > len(before)
        ]
        if ends and count >= min_tokens:
            start, _, word = min(ends)
            return token_ids[:count], text[: start + len(word) * include], word
        before = text
    return token_ids, tokenizer.decode(token_ids), None


def in_runs(long):
    """Return (start, length) of the tokens of each step after the first."""
    starts = np.cumsum(long.runs)[:-1].tolist()
    return list(zip(starts, long.runs[1:], strict=True))


def text_between(llm, long, start, end):
    """Return the text that the tokens start to end - 1 add."""
    decode = llm.tokenizer.decode
    return decode(long.token_ids[:end])[len(decode(long.token_ids[:start])) :]


def some_stops(llm, long, rng):
    """Return stop strings: a part of the output's text, and sometimes others."""
    start = int(rng.integers(4, 40))
    stops = [text_between(llm, long, start, start + int(rng.integers(1, 4)))]
    stops += [["\n", "zzz"], [stops[0][:-1] or "a"], []][rng.integers(3)]
    return tuple(stop for stop in stops if stop)


def assert_stopped(llm, outputs, params, longs):
    for output, one, long in zip(outputs, params, longs, strict=True):
        sample = output.outputs[0]
        token_ids, text, reason = cut(
            llm.tokenizer,
            long.token_ids[: one.max_tokens],
            one.stop,
            min_tokens=one.min_tokens,
            include=one.include_stop_str_in_output,
        )
        assert (sample.token_ids, sample.text, sample.stop_reason) == (token_ids, text, reason)
        assert sample.finish_reason == ("stop" if reason else "length")
