"""`device="simulated"` behaves like the tests' simulated device, which checks its reads."""

from dataclasses import dataclass
from typing import Any

import pytest
from support.contract import differences, run_schedule, tally
from support.engines import VOCAB, generate, make_llm, simulated_engines
from support.scripts import HashScript, Next
from support.texts import letters_folder

from specjax import LLM, SamplingParams


@dataclass(frozen=True)
class Fixed(HashScript):
    """A script in which a token depends only on its position, and all drafts are accepted."""

    def following(self, tokens: list[int], digest: int, seed: int) -> int:
        """See `Script`."""
        return VOCAB // 4 + len(tokens) * 7919 % (VOCAB // 2)

    def draft(self, slot: Any, follow: Next, k: int, most: int) -> tuple[list[int], int]:
        """See `Script`."""
        truth: list[int] = []
        for _ in range(k):
            truth.append(follow(slot, truth))
        return truth, most


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def devices(request, checkpoints) -> tuple[LLM, LLM]:
    folder = checkpoints.target(request.param, vocab_size=VOCAB).folder
    with simulated_engines(Fixed(VOCAB)):
        checked = make_llm(folder, "ngram")
    return checked, make_llm(folder, "ngram", device="simulated")


@pytest.mark.slow
def test_schedules_end_as_on_the_checked_device(devices):
    reports = [[run_schedule(llm, seed) for llm in devices] for seed in range(12)]
    assert [differences(*pair) for pair in reports] == [[]] * len(reports)
    counts = tally([report for _, report in reports])
    assert all(counts[name] for name in ("num_preemptions", "aborted", "stopped", "errors"))


def test_grammars_and_logprobs(checkpoints, caplog):
    pytest.importorskip("llguidance")
    folder = letters_folder(checkpoints)
    with make_llm(folder, "ngram", device="simulated", verbose=True) as llm:
        params = SamplingParams(structured_outputs={"choice": ["ab", "bc"]}, logprobs=1)
        (output,) = generate(llm, "x", params)
        assert output.outputs[0].text in ("ab", "bc")
        rows = output.outputs[0].logprobs
        assert rows and all(entry.logprob == 0 for row in rows for entry in row.values())
        params = SamplingParams(prompt_logprobs=1, max_tokens=2)
        assert len(generate(llm, "xyz", params)[0].prompt_logprobs) == 3
    assert "the device is simulated" in caplog.text
    with pytest.raises(ValueError, match="device='tpu' is not supported; choose one of auto"):
        make_llm(folder, device="tpu")
