"""Streams answers to three callers of one engine. Each new part has one round's accepted tokens.

python examples/streaming.py
"""

import asyncio
import time

from specjax import AsyncLLM, RequestOutputKind, SamplingParams

QUESTIONS = {
    "Ann": "A farmer has 4 fields of 25 trees. How many trees has he?",
    "Ben": "Lisa reads 12 pages a day. How many pages does she read in 3 weeks?",
    "Cleo": "A train goes 60 miles in an hour. How far does it go in 4 hours?",
}
EAGLE3 = {"method": "eagle3", "model": "demo-llama-eagle3", "num_speculative_tokens": 3}


async def ask(llm: AsyncLLM, name: str, start: float) -> None:
    """Print the new parts of an answer as they come. If `name` is Cleo, stop after 20 tokens."""
    params = SamplingParams(temperature=0, max_tokens=48, output_kind=RequestOutputKind.DELTA)
    num_tokens = 0
    async for output in llm.generate(f"Question: {QUESTIONS[name]}\nAnswer:", params):
        new = output.outputs[0]
        num_tokens += len(new.token_ids)
        ms = 1000 * (time.perf_counter() - start)
        print(f"{ms:5.0f} ms  {name:<5} {len(new.token_ids)} tokens  {new.text!r}")
        if name == "Cleo" and num_tokens >= 20:
            break  # leaving the loop aborts the request


async def main() -> None:
    """Ask all questions at once."""
    async with AsyncLLM("demo-llama", speculative_config=EAGLE3, max_model_len=512) as llm:
        start = time.perf_counter()
        await asyncio.gather(*(ask(llm, name, start) for name in QUESTIONS))
        print(f"acceptance length {llm.metrics().mean_acceptance_length:.2f}")


asyncio.run(main())
