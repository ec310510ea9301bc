"""Shared by tests of drafters: an engine that records its drafts, to compare with an oracle.

The oracle has no cache. For each round, it runs the head over all tokens, and then over the head's
own outputs, from the hidden states that transformers computes. So a wrong shift of tokens,
positions, features or cache entries gives another draft. Output tokens are also compared: with
transformers' logits plus the requests' noise.

All engines have the same sizes, and one shape for each kind of step: two requests at a time, chunks
of 16 tokens, and too few pages for two requests of full length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import programs_with

from specjax.config import EngineConfig, SpeculativeConfig
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model
from specjax.device.noise import Stream, gumbel_noise
from specjax.engine.engine import Engine
from specjax.engine.step_model import step_model
from specjax.host.request import Request
from specjax.host.speculation.policy import PolicyRule
from specjax.sampling_params import SamplingParams

torch = pytest.importorskip("torch")

MAX_DEFERRED_ROWS = 6  # three rounds of two requests, less than some tests have without drafts
K = 3  # the most drafts of a step, unless a test asks for more
MAX_LEN = 64
# Of the prompts: 1 to 3 chunks, one of them exact; chunks of 1, K, K + 1, K + 2 tokens.
LENGTHS = (3, 20, 16, 37, 1, 4)
SEED = 7  # of the first request; the others' follow
SIZES = {
    "max_model_len": MAX_LEN,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "num_pages": 6,
    "decode_batches": (2,),
    "prefill_shapes": ((2, 16),),
    "compile_ahead": True,
}
FLOAT32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def small_process(small_test):
    """Free memory after each test, because nearly every test has separate engines."""


def target_states(hf, tokens):
    """Return the final hidden states, and the inputs of layers 0..L, each [T, D]."""
    outputs, decoder = [], hf.get_decoder()

    def keep(module, inputs, out):
        outputs.append(out[0] if isinstance(out, tuple) else out)

    hooks = [layer.register_forward_hook(keep) for layer in decoder.layers]
    final = decoder(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    embedded = hf.get_input_embeddings()(torch.tensor(tokens))
    return final, [embedded, *(out.reshape(final.shape) for out in outputs)]


@cache
def noise_of(seed, vocab_size):
    """Return the noise [MAX_LEN, V] that is added to the logits at each position of a request."""
    make = jax.jit(gumbel_noise, static_argnums=(1, 3))
    seeds, positions = np.full(MAX_LEN, seed, np.uint32), np.arange(MAX_LEN, dtype=np.int32)
    return torch.tensor(np.asarray(make(seeds, Stream.TARGET, (positions,), vocab_size)))


def choose(request, asked, logits, tokens):
    """Return the argmax of edited logits / T + noise; at T = 0, the argmax of edited logits."""
    position, prompt = len(tokens), request.prompt_token_ids
    if request.params.edits_logits:
        oracle = asked(request.params, prompt, tokens[len(prompt) :])
        edited = oracle.edit(logits.tolist())
        logits = torch.tensor(edited).where(torch.tensor(oracle.kept(edited)), -torch.inf)
    if temperature := request.params.temperature:
        noise = noise_of(request.seeds[0], len(logits))[position]
        logits = logits / temperature + noise
    return int(logits.argmax())


def hidden_of(state, num_slots):
    """Return the hidden states [S, D] that drafts start from; zeros if the drafter has none."""
    return getattr(state, "hidden", jnp.zeros((num_slots, 1))).reshape(num_slots, -1)


@dataclass(frozen=True)
class RecordingDrafter:
    """A drafter that records the drafts and hidden states of `inner`, by request and length.

    A request is identified by its seed.
    """

    inner: Drafter
    most: int  # drafts of a step

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def take(self, state, *moves):
        return self.inner.take(state[0], *moves), state[1]

    def restore(self, state, *moves):
        return self.inner.restore(state[0], *moves), state[1]

    def init_state(self, sizes, dtype):
        inner = self.inner.init_state(sizes, dtype)
        shape, width = (len(LENGTHS), MAX_LEN), hidden_of(inner, sizes.num_slots).shape[1]
        return inner, (jnp.full((*shape, self.most), -1), jnp.full((*shape, width), jnp.nan))

    def draft(self, target, params, state, context, k):
        inner, record = state
        hidden = hidden_of(inner, len(context.requests.limits))[context.slots]
        draft, inner = self.inner.draft(target, params, inner, context, k)
        seeds = context.requests.at(context.slots).sampling.seeds
        number = seeds.astype(jnp.int32) - SEED
        row = jnp.where(context.is_active, number, len(LENGTHS))
        padded = jnp.pad(draft.tokens, ((0, 0), (0, self.most - k)), constant_values=-1)
        record = tuple(
            kept.at[row, context.starts].set(new, mode="drop")
            for kept, new in zip(record, (padded, hidden), strict=True)
        )
        return draft, (inner, record)

    def observe(self, target, params, state, seen):
        inner, record = state
        return self.inner.observe(target, params, inner, seen), record


@dataclass
class CyclicPolicy(PolicyRule):
    """A policy with another K in every step."""

    choices: tuple[int, ...]
    num_steps: int = 0

    def choose(self, load):
        self.num_steps += 1
        return self.choices[self.num_steps % len(self.choices)]


def few_deferred(*arguments):
    """Return `step_model` with room for only a few deferred rounds."""
    return step_model(*arguments)._replace(max_deferred_rows=MAX_DEFERRED_ROWS)


def recording_engine(target, folder, policy, method, speculative):
    """Return a drafter and an engine, for a target and the head in a folder."""
    model, params = load_model(target.folder, FLOAT32)
    most = max(K, *policy.choices)
    config = SpeculativeConfig(
        method=method, model=str(folder), num_speculative_tokens=most, **speculative
    )
    drafter, head_params = load_drafter(folder, config, model, FLOAT32, target_folder=target.folder)
    drafter, head_params = drafter.share(head_params, model, params)
    weights, recording = Params(params, head_params), RecordingDrafter(drafter, most)
    make = programs_with(make_model=few_deferred)
    engine = Engine(EngineConfig(**SIZES), model, recording, weights, policy, make_programs=make)
    return drafter, engine


def run(engine, prompts, hot, edits=None, between=lambda engine: None):
    """Run requests of nearly all possible lengths; return each with its tokens.

    Every other request has the temperature `hot`, and the first half has `edits`. `between` is
    called before each step.
    """
    requests = [
        Request(
            i,
            tuple(prompt),
            SamplingParams(
                temperature=hot * (i % 2), **(edits or {} if i < len(prompts) // 2 else {})
            ),
            MAX_LEN - len(prompt) - 2 * i,
            (SEED + i,),
        )
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    outputs = {}
    while engine.has_work:
        between(engine)
        outputs |= {s.request.request_id: s.output for s in engine.step()}
    return [(r, [*r.prompt_token_ids, *outputs[r.request_id]]) for r in requests]


def check_output(request, tokens, logits, draw):
    """Check that output tokens follow from the target's logits [T, V] and the request's noise."""
    assert len(tokens) == request.max_length
    num_prompt = len(request.prompt_token_ids)
    expected = [draw(logits[i - 1], tokens[:i]) for i in range(num_prompt, len(tokens))]
    assert tokens[num_prompt:] == expected


def check_rounds(oracle, fused, tokens, num_prompt, drafts, hidden, draw):
    """Compare every round of a request.

    Return the number of accepted drafts of each round with drafts.
    """
    num_accepted, length = [], num_prompt
    while length < len(tokens) - 1:
        # A draft past the request's end is never put out, and has no page to stand on.
        remaining = len(tokens) - 1 - length
        drafted = [d for d in drafts[length].tolist() if d >= 0]
        found = drafted[:remaining]
        expected = oracle.drafts(fused, tokens, length, len(drafted), len(found), draw)
        assert found == expected, length
        # Without drafts, what they start from may be behind.
        if drafted and getattr(oracle, "keeps_last", False):
            np.testing.assert_allclose(hidden[length], fused[length - 1], rtol=0, atol=1e-4)
        truth = tokens[length + 1 : length + 1 + len(found)]
        accepted = [a == b for a, b in zip(found, truth, strict=True)]
        accepted = (accepted + [False]).index(False)
        num_accepted += [min(accepted, remaining - 1)] if found else []
        length += accepted + 1
    return num_accepted


def check(
    target, folder, method, oracle, *, make_prompts, asked, ks=(2,), edits=None, least=40, **others
):
    """Run requests through an engine with the head in `folder`; compare every draft and token.

    Steps have the K of `ks` in turn. More than `least` rounds must have drafts. `others` are fields
    of the speculative config. Return the drafter, the engine and the recorded drafts.
    """
    policy = CyclicPolicy(ks)
    drafter, engine = recording_engine(target, folder, policy, method, others)
    done = run(engine, make_prompts(*LENGTHS, vocab_size=engine.target.vocab_size), 1.0, edits)
    record = jax.device_get(engine.programs.state.drafter[1])
    num_accepted = []
    for (request, tokens), *rounds in zip(done, *record, strict=True):
        draw = partial(choose, request, asked)
        with torch.no_grad():
            final, entering = target_states(target.hf, tokens)
            check_output(request, tokens, target.hf.get_output_embeddings()(final), draw)
            num_prompt, fused = len(request.prompt_token_ids), oracle.fuse(final, entering)
            num_accepted += check_rounds(oracle, fused, tokens, num_prompt, *rounds, draw)
    assert policy.num_steps > 20
    # The comparison means little if all or no drafts stood.
    assert {0, 1} <= set(num_accepted) and len(num_accepted) > least
    metrics = engine.metrics()
    assert metrics.num_accepted_tokens == sum(num_accepted)
    assert metrics.num_preemptions > 0
    return drafter, engine, record[0].tolist()


def check_plain(target, make_drafter, *, make_prompts, asked, between=lambda engine: None):
    """Run requests through an engine with drafts; compare each token with plain decoding.

    Later requests begin with the outputs of earlier requests, and find their pages. There are few
    pages, of 4 tokens each. `make_drafter` returns a drafter and its parameters, given a model and
    its parameters. Return the engine.
    """
    model, params = load_model(target.folder, FLOAT32)
    drafter, drafter_params = make_drafter(model, params)
    config = EngineConfig(**SIZES | {"page_size": 4, "num_pages": 24})
    engine = Engine(config, model, drafter, Params(params, drafter_params), CyclicPolicy((K,)))
    prompts = make_prompts(*LENGTHS, vocab_size=model.vocab_size)
    for _ in range(2):
        done = run(engine, prompts, 0.8, between=between)
        for request, tokens in done:
            with torch.no_grad():
                logits = target.hf(input_ids=torch.tensor([tokens])).logits[0]
            check_output(request, tokens, logits, partial(choose, request, asked))
        prompts = [tokens[:40] for _, tokens in done]
    metrics = engine.metrics()
    assert metrics.num_preemptions > 0 and metrics.prefix_cache_hits > 0
    return engine


@pytest.fixture
def check_tokens(ragged_prompts, asked) -> Callable[..., Engine]:
    """The function `check_plain`, with its prompts."""
    return partial(check_plain, make_prompts=ragged_prompts, asked=asked)


@pytest.fixture
def check_drafts(ragged_prompts, asked) -> Callable[..., tuple[Drafter, Engine, list]]:
    """The function `check`, with its prompts."""
    return partial(check, make_prompts=ragged_prompts, asked=asked)
