"""What the tests of chain drafters share: an engine that notes its drafts, against an oracle.

The oracle has no cache: for each round it runs the head over all true rows, then over its own
output, from the target's hidden states as transformers computes them. So a wrong shift of tokens,
position, feature or cache entry shows as another draft.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import EngineConfig, SpeculativeConfig
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Params
from specjax.device.drafters.registry import load_drafter, share_embedding
from specjax.device.models.registry import load_model
from specjax.device.noise import Stream, gumbel_noise
from specjax.engine import Engine
from specjax.host.speculation.policy import Rule
from specjax.request import Request
from specjax.sampling_params import SamplingParams

torch = pytest.importorskip("torch")

K = 3  # the most drafts of a step
MAX_LEN = 64
LENGTHS = (3, 21, 16, 37)  # of the prompts: 1 to 3 chunks, one of them exact
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


def choose(request, asked, logits, tokens):
    """argmax(logits / T + Gumbel(seed, position)) of edited logits; the argmax at temperature 0."""
    position, prompt = len(tokens), request.prompt_token_ids
    if request.params.edits_logits:
        oracle = asked(request.params, prompt, tokens[len(prompt) :])
        edited = oracle.edit(logits.tolist())
        logits = torch.tensor(edited).where(torch.tensor(oracle.kept(edited)), -torch.inf)
    if temperature := request.params.temperature:
        seeds, positions = jnp.array(request.seeds, jnp.uint32), jnp.array([position])
        noise = gumbel_noise(seeds, Stream.TARGET, (positions,), len(logits))[0]
        logits = logits / temperature + torch.tensor(np.asarray(noise))
    return int(logits.argmax())


def expected_chain(head, hf_states, tokens, length, num_drafts, choose):
    """The head's input at n - 1, and its drafts for the positions after x_n, n = length.

    It runs over rows (f_p, x_{p+1}) at p = 0..n-1, then over its own output and drafts.
    """
    final, entering = hf_states
    embedded = head.embedding[torch.tensor(tokens[1 : length + 1])]
    hidden = head.fuse(final, entering)[:length]
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


@dataclass(frozen=True)
class RecordingDrafter:
    """Drafts with `inner`, and keeps by request and length what it drafted, and started from.

    A request is told by its prompt's second token, which is its number.
    """

    inner: ChainDrafter

    @property
    def aux_layers(self):
        return self.inner.aux_layers

    def init_state(self, num_slots, num_pages, page_size, dtype):
        inner = self.inner.init_state(num_slots, num_pages, page_size, dtype)
        record = (
            jnp.full((len(LENGTHS), MAX_LEN, K), -1),
            jnp.full((len(LENGTHS), MAX_LEN, inner.hidden.shape[1]), jnp.nan),
        )
        return inner, jnp.zeros(num_slots, jnp.int32), record

    def draft(self, target, params, state, context, k):
        inner, numbers, record = state
        hidden = inner.hidden[context.slots]
        draft, inner = self.inner.draft(target, params, inner, context, k)
        row = jnp.where(context.is_active, numbers[context.slots], len(LENGTHS))
        padded = jnp.pad(draft.tokens, ((0, 0), (0, K - k)), constant_values=-1)
        record = tuple(
            kept.at[row, context.starts].set(new, mode="drop")
            for kept, new in zip(record, (padded, hidden), strict=True)
        )
        return draft, (inner, numbers, record)

    def observe(self, target, params, state, slots, rows, following, features, last):
        inner, numbers, record = state
        inner = self.inner.observe(target, params, inner, slots, rows, following, features, last)
        is_first = rows.positions.reshape(len(slots), -1)[:, 0] == 0
        changed = jnp.where(is_first, following[:, 0], numbers[slots])
        return inner, numbers.at[slots].set(changed, mode="drop"), record


@dataclass
class CyclicPolicy(Rule):
    """Another K every step."""

    choices: tuple[int, ...]
    num_steps: int = 0

    def choose(self, load):
        self.num_steps += 1
        return self.choices[self.num_steps % len(self.choices)]


def check(
    target,
    files,
    method,
    oracle,
    *,
    make_prompts,
    asked,
    ks=(2,),
    num_seqs=1,
    edits=None,
    least=40,
    **speculative,
):
    """Run requests through an engine with the head in `files` and compare every draft.

    The steps take their K from `ks` in turn; more than `least` rounds must have drafted.
    """
    model, params = load_model(target.folder, FLOAT32)
    config = SpeculativeConfig(
        method=method, model=str(files.folder), num_speculative_tokens=K, **speculative
    )
    drafter, head_params = load_drafter(files.folder, config, model, FLOAT32)
    drafter, head_params = share_embedding(drafter, head_params, model, params)
    policy = CyclicPolicy(ks)
    engine = Engine(
        EngineConfig(
            max_model_len=MAX_LEN, max_num_seqs=num_seqs, max_num_batched_tokens=16, num_pages=16
        ),
        model,
        RecordingDrafter(drafter),
        Params(params, head_params),
        policy,
    )
    requests = [
        Request(
            i,
            tuple(prompt),
            SamplingParams(temperature=float(i % 2), **(edits or {})),
            MAX_LEN - len(prompt) - 2 * i,
            (7 + i,),
        )
        for i, prompt in enumerate(make_prompts(*LENGTHS, vocab_size=model.vocab_size))
    ]
    for request in requests:
        engine.add(request)
    outputs = {}
    while engine.has_work:
        outputs |= {s.request.request_id: s.output for s in engine.step()}
    all_drafts, all_hidden = jax.device_get(engine._state.drafter[2])

    num_accepted = []
    for request in requests:
        tokens = [*request.prompt_token_ids, *outputs[request.request_id]]
        assert len(tokens) == request.max_length
        with torch.no_grad():
            states = target_states(target.hf, tokens)
            length = len(request.prompt_token_ids)
            while length < len(tokens) - 1:
                at = request.request_id, length
                drafts = [d for d in all_drafts[at].tolist() if d >= 0]
                # A draft past the request's end is never put out, and has no page to stand on.
                remaining = len(tokens) - 1 - length
                drafts = drafts[:remaining]
                hidden, expected = expected_chain(
                    oracle, states, tokens, length, len(drafts), partial(choose, request, asked)
                )
                np.testing.assert_allclose(all_hidden[at], hidden, rtol=0, atol=1e-4, err_msg=at)
                assert drafts == expected, at
                truth = tokens[length + 1 : length + 1 + len(drafts)]
                accepted = [a == b for a, b in zip(drafts, truth, strict=True)]
                accepted = (accepted + [False]).index(False)
                num_accepted += [min(accepted, remaining - 1)] if drafts else []
                length += accepted + 1
    assert policy.num_steps > 20
    # The comparison means little if all or no drafts stood.
    assert {0, 1} <= set(num_accepted) and len(num_accepted) > least
    assert engine.metrics().num_accepted_tokens == sum(num_accepted)
    return drafter, engine


@pytest.fixture
def check_drafts(ragged_prompts, asked) -> Callable[..., tuple[ChainDrafter, Engine]]:
    """`check`, with prompts to run."""
    return partial(check, make_prompts=ragged_prompts, asked=asked)
