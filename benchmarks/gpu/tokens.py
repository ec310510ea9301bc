"""Compares tokens of whole engines on the card to tokens of a CPU without drafts.

The models are demo checkpoints. The CPU's tokens are in tokens.json. Half of the requests are
greedy, and half have a temperature of 0.8. After a change of the requests, or of the demo
checkpoints, update the file:

    PYTHONPATH=. python benchmarks/gpu/tokens.py       writes tokens.json again
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from timing import Setting, attempt

from specjax.bench.identity import compare
from specjax.bench.measure import decode
from specjax.bench.workload import make_requests, read_questions, tokenize
from specjax.checkpoint.demo import DRAFTERS, demo_folders
from specjax.host.request import Request
from specjax.llm import LLM

FILE = Path(__file__).with_suffix(".json")
NUM_REQUESTS, MAX_TOKENS, TEMPERATURE, K = 16, 48, 0.8, 3
MAX_PROMPT, CHUNK = 96, 32
CPU_METHODS = {"demo-llama": "eagle3", "demo-qwen3.5": "mtp"}  # the smoke test's methods


def check_tokens(
    setting: Setting, dtype: str, models: Sequence[str] = tuple(DRAFTERS)
) -> Iterator[dict[str, Any]]:
    """Check engines without a drafter and with each drafter, for models with a checkpoint here.

    In bfloat16, differing outputs are only counted, because rounding may change them. In float32,
    outputs must be equal, except where scores nearly tie.
    """
    for model in models:
        row = {"what": "same outputs", "model": model, "dtype": dtype}
        if model not in demo_folders():
            yield row | {"absent": f"{model} is not in checkpoints"}
            continue
        expected = json.loads(FILE.read_text())[model]
        drafters = {None: None, "ngram": None} | DRAFTERS[model]
        for method, drafter in drafters.items():
            if setting.is_cpu and method != CPU_METHODS[model]:
                continue
            yield attempt(
                row | {"way": method or "plain"},
                lambda model=model, of=(method, drafter), expected=expected: check(
                    model, of, dtype, expected, setting
                ),
            )


def check(
    model: str,
    drafter: tuple[str | None, str | None],
    dtype: str,
    expected: Sequence[Sequence[int]],
    setting: Setting,
) -> dict[str, Any]:
    """Return the number of outputs that differ from `expected`, and the acceptance length."""
    length = setting.pick(MAX_TOKENS, 6)
    with open_llm(model, drafter, dtype) as llm:
        requests = choose_requests(llm, length)[: setting.pick(None, 4)]
        outputs = decode(llm.engine, requests).outputs
        given = [outputs[one.request_id] for one in requests]
        wanted = [tokens[:length] for tokens in expected[: len(requests)]]
        found = {
            "outputs": len(given),
            "acceptance_length": llm.engine.metrics().mean_acceptance_length,
            "late_compilations": llm.engine.metrics().num_compiles_after_warmup,
        }
        if dtype != "float32":
            pairs = zip(given, wanted, strict=True)
            return found | {"differ": sum(list(a) != list(b) for a, b in pairs)}
        identity = compare(llm.engine, [(one, 0) for one in requests], wanted, given)
    return found | {
        "differ": len(identity.mismatches),
        "num_tokens": identity.num_tokens,
        "near_ties": identity.near_ties,
        "mismatches": identity.mismatches[:3],
        "passes": not identity.mismatches,
    }


def open_llm(model: str, drafter: tuple[str | None, str | None], dtype: str) -> LLM:
    """Open an engine with one shape for rounds and one shape for chunks of prompts."""
    method, checkpoint = drafter
    speculative = None
    if method:
        speculative = {"method": method, "num_speculative_tokens": K}
        speculative |= {"model": checkpoint} if checkpoint else {}
    max_model_len = MAX_PROMPT + MAX_TOKENS + 2 * (K + 1)
    return LLM(
        model,
        speculative_config=speculative,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=CHUNK * NUM_REQUESTS,
        decode_batches=(NUM_REQUESTS,),
        prefill_shapes=((NUM_REQUESTS, CHUNK),),
        num_pages=NUM_REQUESTS * -(-max_model_len // 16),
        enable_prefix_caching=False,
        compile_ahead=True,
        verbose=False,
    )


def choose_requests(llm: LLM, max_tokens: int) -> list[Request]:
    """Return requests for the first questions that are short enough.

    Every second request has a temperature; the others are greedy.
    """
    prompts = tokenize(read_questions(), llm.tokenizer)
    short = [prompt for prompt in prompts if len(prompt) <= MAX_PROMPT][:NUM_REQUESTS]
    given = {"max_tokens": max_tokens, "max_model_len": MAX_PROMPT + MAX_TOKENS, "seed": 0}
    requests = make_requests(short, temperature=0.0, stop_ids=(), **given)
    return [
        replace(one, params=replace(one.params, temperature=TEMPERATURE * (i % 2)))
        for i, one in enumerate(requests)
    ]


def main() -> None:
    """Compute the tokens of every model without drafts, and write them to the file."""
    found = {}
    for model in DRAFTERS:
        with open_llm(model, (None, None), "float32") as llm:
            requests = choose_requests(llm, MAX_TOKENS)
            outputs = decode(llm.engine, requests).outputs
            found[model] = [list(outputs[one.request_id]) for one in requests]
    FILE.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
