"""Runs prompts through Hugging Face transformers, in a separate process.

The first line on stdin is a `Work` as JSON. The process loads the model, and answers with the
versions of transformers and torch. After every further line, the process runs all prompts once, and
answers with the seconds that they took and the outputs' token ids. Each answer is one line of JSON
on stdout. Nothing else is written to stdout. This module imports neither JAX nor the engine.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import transformers


class Runner:
    """A model and its prompts, in batches that are padded on the left."""

    def __init__(self, work: dict[str, Any]):
        self._work = work
        if work["num_threads"]:
            torch.set_num_threads(work["num_threads"])
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            work["model"], dtype=getattr(torch, work["dtype"])
        )
        self._model = model.to(device).eval()
        self._device = device
        self._cache: Any = None
        # One width and one cache for all batches, so that a compiled model is compiled once.
        self._width = max(map(len, work["prompts"]))
        self._most = max(work["output_lens"])
        if work["is_compiled"]:
            self._model.forward = torch.compile(self._model.forward, dynamic=False)
            self._cache = transformers.StaticCache(
                config=self._model.config, max_cache_len=self._width + self._most
            )
        torch.manual_seed(work["seed"])

    @torch.inference_mode()
    def run(self) -> dict[str, Any]:
        """Continue all prompts. Return the seconds, and each output's token ids."""
        work, outputs = self._work, []
        size, start = work["batch_size"], time.perf_counter()
        for i in range(0, len(work["prompts"]), size):
            part = slice(i, i + size)
            outputs += self._batch(work["prompts"][part], work["output_lens"][part], size)
        return {"seconds": time.perf_counter() - start, "outputs": outputs}

    def _batch(
        self, prompts: list[list[int]], output_lens: list[int], size: int
    ) -> list[list[int]]:
        work = self._work
        is_compiled = self._cache is not None
        width = self._width if is_compiled else max(map(len, prompts))
        num_real = len(prompts)
        if is_compiled:  # fill up the last batch
            prompts = prompts + [prompts[-1]] * (min(size, len(work["prompts"])) - num_real)
            self._cache.reset()
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor(
            [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device
        )
        stops = None if work["sampling"].get("ignore_eos") else work["stop_ids"] or None
        options = {k: v for k, v in work["sampling"].items() if k != "ignore_eos"}
        is_greedy = not options.pop("temperature")
        if not is_greedy:
            options["temperature"] = work["sampling"]["temperature"]
        if is_compiled:
            options["past_key_values"] = self._cache
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=not is_greedy,
            max_new_tokens=max(output_lens),
            eos_token_id=stops,
            pad_token_id=0,
            disable_compile=True,  # `forward` is compiled above, if at all
            **options,
        )
        rows = out[:num_real, width:].tolist()
        return [_cut(row, count, stops or ()) for row, count in zip(rows, output_lens, strict=True)]


def _cut(row: list[int], count: int, stops: Any) -> list[int]:
    """Return at most `count` tokens of an output, up to and including the first stop token."""
    row = row[:count]
    end = next((i for i, token in enumerate(row) if token in stops), count)
    return row[: end + 1]


def main() -> None:
    """Answer the lines on stdin until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print to stdout now print to stderr

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    runner = Runner(json.loads(sys.stdin.readline()))
    answer({"version": transformers.__version__, "torch": torch.__version__})
    for _ in sys.stdin:
        answer(runner.run())


if __name__ == "__main__":
    main()
