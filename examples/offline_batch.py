"""Answers a batch of questions without and with drafts, which give the same tokens faster.

python examples/offline_batch.py
"""

import time

from specjax import LLM, RequestOutput, SamplingParams
from specjax.bench.workload import read_questions

PROMPTS = [f"Question: {question}\nAnswer:" for question in read_questions()[:12]]
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=64)
EAGLE3 = {"method": "eagle3", "model": "demo-llama-eagle3", "num_speculative_tokens": 3}


def run(name: str, speculative_config: dict | None) -> list[RequestOutput]:
    """Return the outputs of one engine, which runs two requests at a time."""
    with LLM(
        "demo-llama",
        speculative_config=speculative_config,
        max_model_len=512,
        max_num_seqs=2,
        verbose=False,
    ) as llm:
        llm.generate(PROMPTS[:2], PARAMS, use_tqdm=False)  # to warm up
        start = time.perf_counter()
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        seconds, length = time.perf_counter() - start, llm.metrics().mean_acceptance_length
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{name:<8} {num_tokens / seconds:4.0f} tokens/s, acceptance length {length:.2f}")
    return outputs


plain, drafted = run("plain", None), run("EAGLE-3", EAGLE3)
texts = [[output.outputs[0].text for output in outputs] for outputs in (plain, drafted)]
print("the same text:", texts[0] == texts[1])
print(f"\n{PROMPTS[1]}{texts[1][1]}")
