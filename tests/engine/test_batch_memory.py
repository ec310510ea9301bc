"""The host may reuse the memory of packed arrays once it has the step's results."""

import numpy as np
import pytest
from support.engines import make_llm
from support.shared_models import EOS, VOCAB, llama, prepare_everything
from support.tiny import AnyText

import specjax.engine.launcher
from specjax import SamplingParams
from specjax.host.request import Request

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def engine(checkpoints):
    """An engine whose steps for grammars are compiled, so that nothing compiles during the test."""
    with make_llm(checkpoints.with_letters(llama(checkpoints).folder)) as llm:
        prepare_everything(llm)
        yield llm.engine


class EvenMatcher(AnyText):
    """A matcher that permits the tokens 0, 2, 4, ..."""

    def masks(self, drafts):
        return np.full((len(drafts) + 1, VOCAB // 32), 0x55555555, np.int32)


def generate(engine):
    """After each step, yield the outputs so far. Two of the requests have a grammar."""
    rng = np.random.default_rng(1)
    for i, length in enumerate([40, 3, 17, 32, 1]):
        grammar = {"structured_outputs": {"regex": "any"}} if i % 2 else {}
        params = SamplingParams(temperature=0.8, **grammar)
        prompt = tuple(rng.integers(0, EOS, length).tolist())
        follow = EvenMatcher if grammar else None
        engine.add(Request(i, prompt, params, 12, (i,), follow_grammar=follow))
    outputs = {}
    while engine.has_work:
        for sequence in engine.step():
            outputs[sequence.request.request_id] = list(sequence.output)
        yield outputs


def test_packed_arrays_are_done_with_when_their_results_are_there(engine, monkeypatch):
    """If they are overwritten then, no output changes: no later step reads them."""
    *_, expected = generate(engine)
    assert sorted(map(len, expected.values())) == [12] * 5
    assert all(token % 2 == 0 for i in (1, 3) for token in expected[i])
    steps, kinds = [], set()

    def recording(name):
        real = getattr(specjax.engine.launcher, name)

        def record(*arguments):
            # Aligned as XLA likes it, so that the device uses the host's memory without a copy.
            packed = real(*arguments)
            memory = np.zeros(packed.nbytes + 64, np.uint8)
            start = -memory.ctypes.data % 64
            aligned = memory[start : start + packed.nbytes].view(np.int32).reshape(packed.shape)
            aligned[:] = packed
            if name == "pack":  # comes first in a step
                steps.append([])
            steps[-1].append(aligned)
            kinds.add(name)
            return aligned

        monkeypatch.setattr(specjax.engine.launcher, name, record)

    for name in "pack", "pack_admissions", "pack_masks":
        recording(name)
    outputs = {}
    for outputs in generate(engine):  # noqa: B007
        for step in steps[:-2]:  # the last two are in flight: chunks and a round
            for packed in step:
                packed[:] = 1
    assert len(steps) > 20 and len(kinds) == 3
    assert outputs == expected
