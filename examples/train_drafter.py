"""Trains an EAGLE-1 drafter for the demo model for a few steps, which raises acceptance.

    pip install "specjax[train]" && python examples/train_drafter.py

A useful drafter needs real questions and hundreds of steps; the model cards in `checkpoints/` have
the commands. This drafter imitates the target's answers to 32 made-up questions.
"""

import json
import random
import tempfile
from pathlib import Path

from specjax import LLM, SamplingParams
from specjax.cli import main as specjax

rng = random.Random(0)


def question() -> str:
    """Return a random question, one of a few thousand."""
    name, thing = rng.choice(["Tom", "Ann", "Ben", "Lisa"]), rng.choice(["eggs", "pens", "cards"])
    boxes, size = rng.randint(2, 20), rng.randint(2, 20)
    return f"{name} has {boxes} boxes of {size} {thing}. How many {thing} does {name} have?"


def acceptance_length(drafter: Path, prompts: list[str]) -> float:
    """Return the acceptance length with three drafts per round, at temperature 0."""
    config = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 3}
    with LLM("demo-llama", speculative_config=config, max_model_len=128, verbose=False) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
        return llm.metrics().mean_acceptance_length


with tempfile.TemporaryDirectory() as place:
    asked, answers, drafter = (Path(place) / name for name in ("q.jsonl", "a.jsonl", "drafter"))
    rows = [json.dumps({"question": question(), "answer": ""}) for _ in range(32)]
    asked.write_text("\n".join(rows))
    command = f"train answers --target demo-llama --data {asked} --out {answers} --max-tokens 48"
    specjax(command.split())
    held_out = [f"Question: {question()}\nAnswer:" for _ in range(8)]
    for steps in 1, 40:  # the second run resumes the first run
        command = f"train eagle1 --target demo-llama --data {answers} --out {drafter}"
        specjax([*command.split(), *f"--steps {steps} --batch-size 8 --length 80".split()])
        length = acceptance_length(drafter, held_out)
        print(f"after {steps:3} training steps: acceptance length {length:.2f}")
