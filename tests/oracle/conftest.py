"""What the tests of chain drafters share: an engine that notes its drafts, against an oracle.

The oracle has no cache: for each round it runs the head over all true rows, then over its own
output, from the target's hidden states as transformers computes them. So a wrong shift of tokens,
position, feature or cache entry shows as another draft. What is put out is compared as well, with
what transformers' logits and the requests' noise come to.

All engines have the same sizes and one shape of each kind of step: two requests at a time, in
chunks of 16 tokens, and pages for less than two of full length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import programs_with

from specjax.config import EngineConfig, SpeculativeConfig
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Params
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


class Oracle(Protocol):
    """A chain drafter's head in torch, over all rows at once."""

    embedding: torch.Tensor

    def fuse(self, final: torch.Tensor, entering: list[torch.Tensor]) -> torch.Tensor:
        """The target's features, final and entering each layer, as the head's hidden states."""
        ...

    def run(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The head's output y at every row."""
        ...

    def recycled(self, y: torch.Tensor) -> torch.Tensor:
        """What the next draft takes for its hidden state."""
        ...

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        """Of one row, over the target's vocabulary."""
        ...


@runtime_checkable
class BlockOracle(Protocol):
    """A drafter in torch that makes all drafts of a round by itself."""

    def fuse(self, final: torch.Tensor, entering: list[torch.Tensor]) -> torch.Tensor:
        """The target's features, as of `Oracle`."""
        ...

    def drafts(self, fused, tokens, length, k, num_drafts, choose) -> list[int]:
        """The first drafts of k, for the positions after x_n, n = length."""
        ...


def target_states(hf, tokens):
    """(hidden states after the final norm, residual streams entering layer 0..L), each [T, D]."""
    outputs, decoder = [], hf.get_decoder()
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in decoder.layers
    ]
    final = decoder(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    embedded = hf.get_input_embeddings()(torch.tensor(tokens))
    return final, [embedded, *(out.reshape(final.shape) for out in outputs)]


@cache
def noise_of(seed, vocab_size):
    """What is added to the logits at every position of a request: [MAX_LEN, V]."""
    make = jax.jit(gumbel_noise, static_argnums=(1, 3))
    seeds, positions = np.full(MAX_LEN, seed, np.uint32), np.arange(MAX_LEN, dtype=np.int32)
    return torch.tensor(np.asarray(make(seeds, Stream.TARGET, (positions,), vocab_size)))


def choose(request, asked, logits, tokens):
    """argmax(logits / T + Gumbel(seed, position)) of edited logits; the argmax at temperature 0."""
    position, prompt = len(tokens), request.prompt_token_ids
    if request.params.edits_logits:
        oracle = asked(request.params, prompt, tokens[len(prompt) :])
        edited = oracle.edit(logits.tolist())
        logits = torch.tensor(edited).where(torch.tensor(oracle.kept(edited)), -torch.inf)
    if temperature := request.params.temperature:
        noise = noise_of(request.seeds[0], len(logits))[position]
        logits = logits / temperature + noise
    return int(logits.argmax())


def expected_chain(head, fused, tokens, length, num_drafts, choose):
    """The head's input at n - 1, and its drafts for the positions after x_n, n = length.

    It runs over rows (f_p, x_{p+1}) at p = 0..n-1, then over its own output and drafts.
    """
    embedded = head.embedding[torch.tensor(tokens[1 : length + 1])]
    hidden = fused[:length]
    first, y = hidden[-1], head.run(embedded, hidden)[-1]
    drafts = []
    committed = tokens[: length + 1]
    for j in range(num_drafts):
        if j:
            embedded = torch.cat([embedded, head.embedding[drafts[-1]][None]])
            hidden = torch.cat([hidden, head.recycled(y)[None]])
            y = head.run(embedded, hidden)[-1]
        drafts.append(choose(head.logits(y), [*committed, *drafts]))
    return first, drafts


def hidden_of(state, num_slots):
    """The hidden states [S, D] that drafts start from; zeros of a drafter that has none."""
    return getattr(state, "hidden", jnp.zeros((num_slots, 1))).reshape(num_slots, -1)


@dataclass(frozen=True)
class RecordingDrafter:
    """Drafts with `inner`, and keeps by request and length what it drafted, and started from.

    A request is told by its seed.
    """

    inner: ChainDrafter
    most: int  # drafts of a step

    @property
    def aux_layers(self):
        return self.inner.aux_layers

    @property
    def is_recurrent(self):
        return self.inner.is_recurrent

    @property
    def may_defer(self):
        return self.inner.may_defer

    def take(self, state, *moves):
        return self.inner.take(state[0], *moves), state[1]

    def restore(self, state, *moves):
        return self.inner.restore(state[0], *moves), state[1]

    def draft_slots(self, k):
        return self.inner.draft_slots(k)

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


def recorded(engine):
    """By request and length: drafts, -1 for none, and the hidden state that they start from."""
    return jax.device_get(engine.programs.state.drafter[1])


@dataclass
class CyclicPolicy(PolicyRule):
    """Another K every step."""

    choices: tuple[int, ...]
    num_steps: int = 0

    def choose(self, load):
        self.num_steps += 1
        return self.choices[self.num_steps % len(self.choices)]


def recording_engine(target, files, policy, method, speculative):
    """(drafter, engine) of a target and a head in `files`."""
    model, params = load_model(target.folder, FLOAT32)
    most = max(K, *policy.choices)
    config = SpeculativeConfig(
        method=method, model=str(files.folder), num_speculative_tokens=most, **speculative
    )
    drafter, head_params = load_drafter(
        files.folder, config, model, FLOAT32, target_folder=target.folder
    )
    drafter, head_params = drafter.share(head_params, model, params)
    weights, recording = Params(params, head_params), RecordingDrafter(drafter, most)
    make = programs_with(make_model=few_deferred)
    engine = Engine(EngineConfig(**SIZES), model, recording, weights, policy, make_programs=make)
    return drafter, engine


def few_deferred(*arguments):
    """`step_model` with room for a few rounds that are observed later."""
    return step_model(*arguments)._replace(max_deferred_rows=MAX_DEFERRED_ROWS)


def run(engine, requests, between=lambda engine: None):
    """The tokens of every request, prompt included; `between` is called before each step."""
    for request in requests:
        engine.add(request)
    outputs = {}
    while engine.has_work:
        between(engine)
        outputs |= {s.request.request_id: s.output for s in engine.step()}
    return [[*r.prompt_token_ids, *outputs[r.request_id]] for r in requests]


def check_rounds(oracle, fused, tokens, num_prompt, drafts, hidden, choose):
    """Compare every round of one request; how many drafts each that drafted had accepted."""
    num_accepted, length = [], num_prompt
    while length < len(tokens) - 1:
        # A draft past the request's end is never put out, and has no page to stand on.
        remaining = len(tokens) - 1 - length
        drafted = [d for d in drafts[length].tolist() if d >= 0]
        found = drafted[:remaining]
        if isinstance(oracle, BlockOracle):
            expected = oracle.drafts(fused, tokens, length, len(drafted), len(found), choose)
        elif not drafted:  # what drafts start from may be behind
            expected = []
        else:
            start, expected = expected_chain(oracle, fused, tokens, length, len(found), choose)
            np.testing.assert_allclose(
                hidden[length], start, rtol=0, atol=1e-4, err_msg=str(length)
            )
        assert found == expected, length
        truth = tokens[length + 1 : length + 1 + len(found)]
        accepted = [a == b for a, b in zip(found, truth, strict=True)]
        accepted = (accepted + [False]).index(False)
        num_accepted += [min(accepted, remaining - 1)] if found else []
        length += accepted + 1
    return num_accepted


def check(
    target, files, method, oracle, *, make_prompts, asked, ks=(2,), edits=None, least=40, **others
):
    """Run requests through an engine with the head in `files`; compare every draft and token.

    The steps take their K from `ks` in turn; more than `least` rounds must have drafted. `others`
    are of the speculative config.
    """
    policy = CyclicPolicy(ks)
    drafter, engine = recording_engine(target, files, policy, method, others)
    requests = [
        Request(
            i,
            tuple(prompt),
            SamplingParams(temperature=float(i % 2), **(edits or {})),
            MAX_LEN - len(prompt) - 2 * i,
            (SEED + i,),
        )
        for i, prompt in enumerate(make_prompts(*LENGTHS, vocab_size=engine.target.vocab_size))
    ]
    sequences = run(engine, requests)
    num_accepted = []
    for request, tokens, *rounds in zip(requests, sequences, *recorded(engine), strict=True):
        assert len(tokens) == request.max_length
        num_prompt = len(request.prompt_token_ids)
        draw = partial(choose, request, asked)
        with torch.no_grad():
            final, entering = target_states(target.hf, tokens)
            logits = target.hf.get_output_embeddings()(final)
            expected = [draw(logits[i - 1], tokens[:i]) for i in range(num_prompt, len(tokens))]
            assert tokens[num_prompt:] == expected
            fused = oracle.fuse(final, entering)
            num_accepted += check_rounds(oracle, fused, tokens, num_prompt, *rounds, draw)
    assert policy.num_steps > 20
    # The comparison means little if all or no drafts stood.
    assert {0, 1} <= set(num_accepted) and len(num_accepted) > least
    metrics = engine.metrics()
    assert metrics.num_accepted_tokens == sum(num_accepted)
    assert metrics.num_preemptions > 0
    return drafter, engine


def check_plain(target, make_drafter, *, make_prompts, asked, between=lambda engine: None):
    """Run requests, then others that begin with their outputs, through an engine that drafts, is
    short of pages and finds those of earlier requests; compare every token with plain decoding.

    `make_drafter` gives a drafter and its parameters for a model and its own. Temperatures 0 and
    0.8 take turns; pages have 4 tokens. Returns the engine.
    """
    model, params = load_model(target.folder, FLOAT32)
    drafter, drafter_params = make_drafter(model, params)
    config = EngineConfig(**SIZES | {"page_size": 4, "num_pages": 24})
    engine = Engine(config, model, drafter, Params(params, drafter_params), CyclicPolicy((K,)))
    prompts = make_prompts(*LENGTHS, vocab_size=model.vocab_size)
    for _ in range(2):
        requests = [
            Request(
                i,
                tuple(prompt),
                SamplingParams(temperature=0.8 * (i % 2)),
                MAX_LEN - len(prompt) - 2 * i,
                (SEED + i,),
            )
            for i, prompt in enumerate(prompts)
        ]
        sequences = run(engine, requests, between)
        for request, tokens in zip(requests, sequences, strict=True):
            assert len(tokens) == request.max_length
            with torch.no_grad():
                logits = target.hf(input_ids=torch.tensor([tokens])).logits[0]
            for i in range(len(request.prompt_token_ids), len(tokens)):
                assert tokens[i] == choose(request, asked, logits[i - 1], tokens[:i]), i
        prompts = [tokens[:40] for tokens in sequences]
    metrics = engine.metrics()
    assert metrics.num_preemptions > 0 and metrics.prefix_cache_hits > 0
    return engine


@pytest.fixture
def check_tokens(ragged_prompts, asked) -> Callable[..., Engine]:
    """`check_plain`, with prompts to run."""
    return partial(check_plain, make_prompts=ragged_prompts, asked=asked)


@pytest.fixture
def check_drafts(ragged_prompts, asked) -> Callable[..., tuple[ChainDrafter, Engine]]:
    """`check`, with prompts to run."""
    return partial(check, make_prompts=ragged_prompts, asked=asked)
