"""Drafters that are always right, always wrong, or mixed: every count of accepted drafts occurs.

An untrained head is right only by chance. Here, drafts come from a table, so a test determines how
many are accepted, and where accepted runs end.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import SIZES, K, generate_tokens, make_llm, random_prompts
from support.shared_models import VOCAB, llama

from specjax import SamplingParams
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Params, Stateless
from specjax.device.verification import Draft
from specjax.engine.engine import Engine
from specjax.host.request import Request
from specjax.host.speculation.policy import StaticPolicy

pytestmark = pytest.mark.slow

MAX_LEN = SIZES["max_model_len"]
COUNTS = "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_generation_tokens"


@dataclass(frozen=True)
class KnowingDrafter(Stateless):
    """A drafter whose parameters i32[R, L] are the drafts: of request r, for position p.

    The second token of a request's prompt is its number r.
    """

    num_requests: int

    def init_state(self, sizes, dtype):
        return jnp.zeros(sizes.num_slots, jnp.int32)

    def draft(self, target, params, state, context, k):
        positions = context.starts[:, None] + 1 + jnp.arange(k)[None]
        rows = state[context.slots][:, None]
        return Draft(params.drafter.at[rows, positions].get(mode="clip"), None), state

    def observe(self, target, params, state, seen):
        is_first = seen.rows.by_request(seen.rows.positions)[:, 0] == 0
        number = jnp.where(is_first, seen.following[:, 0], state[seen.slots])
        return state.at[seen.slots].set(number, mode="drop")


@dataclass(frozen=True)
class Oracle:
    """An engine whose drafter can be given right or wrong drafts."""

    engine: Engine
    prompts: list
    truth: np.ndarray  # i32[R, L], prompt and greedy continuation

    def run(self, table, max_tokens, stop_ids=()):
        """Run all prompts with the drafts in `table`. Return the outputs, and counts."""
        engine = self.engine
        engine.params = Params(engine.params.target, jnp.array(table, jnp.int32))
        before, greedy = engine.metrics(), SamplingParams(temperature=0)
        for i, prompt in enumerate(self.prompts):
            request = Request(i, tuple(prompt), greedy, max_tokens, (0,), tuple(stop_ids))
            engine.add(request)
        outputs = {}
        for _ in range(1000):  # where a bug would go on forever
            outputs |= {s.request.request_id: s.output for s in engine.step()}
        assert not engine.has_work
        after, pages = engine.metrics(), engine.scheduler.pages
        assert engine.scheduler.num_running == 0 and pages.num_free == pages.num_pages
        counts = [getattr(after, name) - getattr(before, name) for name in COUNTS]
        return [outputs[i] for i in range(len(self.prompts))], counts

    def expected(self, i, max_tokens):
        start = len(self.prompts[i])
        return self.truth[i, start : start + max_tokens].tolist()


@pytest.fixture(scope="module")
def oracle(checkpoints):
    prompts = random_prompts(4, 33, 64, 2, 70, 32, 9, vocab_size=VOCAB, seed=1)
    for i, prompt in enumerate(prompts):
        prompt[1] = i
    params = SamplingParams(temperature=0, max_tokens=MAX_LEN, ignore_eos=True)
    sizes = {name: size for name, size in SIZES.items() if name != "verbose"}
    with make_llm(llama(checkpoints).folder) as plain:
        outputs = generate_tokens(plain, prompts, params)
        truth = np.array([p + tokens for p, tokens in zip(prompts, outputs, strict=True)], np.int32)
        engine = Engine(
            # It learns who is who from the beginning of a prompt.
            EngineConfig(num_pages=64, enable_prefix_caching=False, **sizes),
            plain.target,
            KnowingDrafter(len(prompts)),
            Params(plain.engine.params.target, jnp.array(truth)),
            StaticPolicy(K),
        )
        yield Oracle(engine, prompts, truth)


@pytest.mark.parametrize(
    "share, max_tokens", [(0.0, 33), (0.7, 50), (1.0, 33), *((1.0, n) for n in range(1, 10))]
)
def test_counts_are_exact(oracle, share, max_tokens):
    """Drafts are right, wrong or random: every count occurs, from every place in a page.

    `max_tokens` may end an accepted run.
    """
    is_right = np.random.default_rng(2).random(oracle.truth.shape) < share
    table = np.where(is_right, oracle.truth, (oracle.truth + 1) % VOCAB)
    outputs, counts = oracle.run(table, max_tokens)
    num_rounds = num_drafts = num_accepted = 0
    for i, prompt in enumerate(oracle.prompts):
        length, end = len(prompt), len(prompt) + max_tokens
        while length < end - 1:
            run = [*is_right[i, length + 1 : length + 1 + K].tolist(), False].index(False)
            room = end - 2 - length
            accepted = min(run, room)
            num_rounds, num_drafts = num_rounds + (room > 0), num_drafts + min(K, room)
            num_accepted, length = num_accepted + accepted, length + accepted + 1
    assert outputs == [oracle.expected(i, max_tokens) for i in range(len(outputs))]
    assert counts == [num_rounds, num_drafts, num_accepted, max_tokens * len(outputs)]


@pytest.mark.parametrize("place", range(10))
def test_a_stop_id_may_stand_anywhere_in_an_accepted_run(oracle, place):
    """The stop id is kept, and no token after it is put out."""
    stop = oracle.expected(0, 20)[place]
    outputs, counts = oracle.run(oracle.truth, 20, [VOCAB - 1, stop])
    for i, output in enumerate(outputs):
        expected = oracle.expected(i, 20)
        ends = [j for j, token in enumerate(expected) if token in (stop, VOCAB - 1)]
        assert output == (expected[: ends[0] + 1] if ends else expected)
    assert counts[-1] == sum(map(len, outputs))
