"""EAGLE heads against torch: each draft and hidden state, at every round of every request.

The oracle is written from the published description. It has no cache: for each round it runs the
head over all true rows, then over its own output, from the target's hidden states as transformers
computes them. So a wrong shift of tokens, position, feature or cache entry shows as another draft.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from specjax.host.speculation.policy import StaticPolicy
from specjax.request import Request
from specjax.sampling_params import SamplingParams

torch = pytest.importorskip("torch")

K = 3  # the most drafts of a step
VOCAB = 24  # small, so that an untrained head is right now and then
MAX_LEN = 64
LENGTHS = (3, 21, 16, 37)  # of the prompts: 1 to 3 chunks, one of them exact
TORCH_FILE = "pytorch_model.bin"
FLOAT32 = np.dtype(np.float32)


# --- the oracle -----------------------------------------------------------------------------------


def rms_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotate(x, theta):
    """Rotary embedding of x [T, H, D], row t at position t."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


@dataclass(frozen=True)
class OracleHead:
    """An EAGLE head in torch, from the tensors and config of its checkpoint."""

    tensors: dict[str, torch.Tensor]
    decoder: dict[str, Any]
    embedding: torch.Tensor
    lm_head: torch.Tensor
    aux_layers: tuple[int, ...] = ()  # none: EAGLE-1
    norm_before_residual: bool = False
    recycle_normed: bool = False

    @property
    def layer(self):
        return "midlayer" if "midlayer.hidden_norm.weight" in self.tensors else "layers.0"

    def weight(self, name):
        return self.tensors[name + ".weight"]

    def norm(self, x, name):
        return rms_norm(x, self.weight(name), self.decoder["rms_norm_eps"])

    def attend(self, x):
        dim, theta = self.decoder["head_dim"], self.decoder["rope_theta"]
        q, k, v = (
            (x @ self.weight(f"{self.layer}.self_attn.{n}_proj").T).unflatten(-1, (-1, dim))
            for n in "qkv"
        )
        group = q.shape[1] // k.shape[1]
        q, k = rotate(q, theta), rotate(k, theta)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        return mixed @ self.weight(f"{self.layer}.self_attn.o_proj").T

    def mlp(self, x):
        gate, up, down = (self.weight(f"{self.layer}.mlp.{n}_proj") for n in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def after_attention(self, a):
        return a + self.mlp(self.norm(a, f"{self.layer}.post_attention_layernorm"))

    def run(self, embedded, hidden):
        """y of all rows: x = fc [e; f] for EAGLE-1, u = [norm(e); norm(g)] for EAGLE-3."""
        if not self.aux_layers:
            x = torch.cat([embedded, hidden], -1) @ self.weight("fc").T
            x = x + self.tensors.get("fc.bias", torch.zeros(()))
            return self.after_attention(x + self.attend(x))
        normed = self.norm(hidden, f"{self.layer}.hidden_norm")
        u = torch.cat([self.norm(embedded, f"{self.layer}.input_layernorm"), normed], -1)
        residual = normed if self.norm_before_residual else hidden
        return self.after_attention(residual + self.attend(u))

    def fuse(self, final, entering):
        """The target's features as the head's hidden states."""
        if not self.aux_layers:
            return final
        states = [entering[i] for i in self.aux_layers]
        if "fc_norm.0.weight" in self.tensors:
            states = [self.norm(x, f"fc_norm.{i}") for i, x in enumerate(states)]
        states = torch.cat(states, -1)
        if "input_norm.weight" in self.tensors:
            states = self.norm(states, "input_norm")
        return states @ self.weight("fc").T

    def logits(self, y):
        """Over the target's vocabulary; ids that the head cannot draft are at -inf."""
        if not self.aux_layers:
            return y @ self.lm_head.T
        small = self.norm(y, "norm") @ self.lm_head.T
        if "d2t" not in self.tensors:
            return small
        ids = torch.arange(len(small)) + self.tensors["d2t"]
        return torch.full((VOCAB,), -torch.inf).index_copy(0, ids, small)

    def recycled(self, y):
        return self.norm(y, "norm") if self.recycle_normed else y


def target_states(hf, tokens):
    """(hidden states after the final norm, residual streams entering layer 0..L), each [T, D]."""
    outputs = []
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in hf.model.layers
    ]
    final = hf.model(torch.tensor([tokens])).last_hidden_state[0]
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
        noise = gumbel_noise(seeds, Stream.TARGET, (positions,), VOCAB)[0]
        logits = logits / temperature + torch.tensor(np.asarray(noise))
    return int(logits.argmax())


def expected_chain(head, hf_states, tokens, length, num_drafts, choose):
    """The head's output at n - 1, and its drafts for the positions after x_n, n = length.

    It runs over rows (f_p, x_{p+1}) at p = 0..n-1, then over its own output and drafts.
    """
    final, entering = hf_states
    embedded = head.embedding[torch.tensor(tokens[1 : length + 1])]
    hidden = head.fuse(final, entering)[:length]
    first = y = head.run(embedded, hidden)[-1]
    drafts = []
    committed = tokens[: length + 1]
    for j in range(num_drafts):
        if j:
            embedded = torch.cat([embedded, head.embedding[drafts[-1]][None]])
            hidden = torch.cat([hidden, head.recycled(y)[None]])
            y = head.run(embedded, hidden)[-1]
        drafts.append(choose(head.logits(y), [*committed, *drafts]))
    return head.recycled(first), drafts


# --- the engine, with its drafts written down -----------------------------------------------------


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
class CyclicPolicy:
    """Another K every step."""

    choices: tuple[int, ...]
    num_steps: int = 0

    def choose(self, batch_size):
        self.num_steps += 1
        return self.choices[self.num_steps % len(self.choices)]


def check(
    target,
    files,
    method,
    oracle,
    make_prompts,
    *,
    policy=None,
    num_seqs=1,
    edits=None,
    asked=None,
    **speculative,
):
    """Run requests through an engine with the head in `files` and compare every draft."""
    model, params = load_model(target.folder, FLOAT32)
    config = SpeculativeConfig(
        method=method, model=str(files.folder), num_speculative_tokens=K, **speculative
    )
    drafter, head_params = load_drafter(files.folder, config, model, FLOAT32)
    drafter, head_params = share_embedding(drafter, head_params, model, params)
    engine = Engine(
        EngineConfig(
            max_model_len=MAX_LEN, max_num_seqs=num_seqs, max_num_batched_tokens=16, num_pages=16
        ),
        model,
        RecordingDrafter(drafter),
        Params(params, head_params),
        policy or StaticPolicy(2),
    )
    requests = [
        Request(
            i,
            tuple(prompt),
            SamplingParams(temperature=float(i % 2), **(edits or {})),
            MAX_LEN - len(prompt) - 2 * i,
            (7 + i,),
        )
        for i, prompt in enumerate(make_prompts(*LENGTHS, vocab_size=VOCAB))
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
    # The comparison means little if all or no drafts stood.
    assert {0, 1} <= set(num_accepted) and len(num_accepted) > 40
    assert engine.metrics().num_accepted_tokens == sum(num_accepted)
    return drafter, engine


def oracle_of(target, files, *, aux_layers=(), decoder=None, **options):
    embedding = target.hf.get_input_embeddings().weight
    own_head = files.tensors.get("lm_head.weight")
    return OracleHead(
        files.tensors,
        decoder or files.config,
        files.tensors.get("embed_tokens.weight", embedding).detach(),
        (target.hf.get_output_embeddings().weight if own_head is None else own_head).detach(),
        aux_layers,
        **options,
    )


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=3)


# --- EAGLE-1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, keeps_embedding",
    [
        ({"embedding": "same"}, False),
        ({"embedding": "own", "fc_bias": True, "rope_theta": 5e2, "file": TORCH_FILE}, True),
        # The bias is said by the config, but is not there.
        ({"num_attention_heads": 2, "head_dim": 12, "rms_norm_eps": 0.1, "bias": True}, False),
    ],
    ids=["plain", "fc-bias-own-embedding", "own-geometry-no-bias"],
)
def test_eagle1_drafts(checkpoints, ragged_prompts, target, options, keeps_embedding):
    files = checkpoints.eagle(target, **options)
    drafter, engine = check(target, files, "eagle", oracle_of(target, files), ragged_prompts)
    assert drafter.head.has_embedding == keeps_embedding
    assert (engine.params.drafter.embedding is not None) == keeps_embedding


# --- EAGLE-3 --------------------------------------------------------------------------------------


def test_eagle3_default_layers(checkpoints, ragged_prompts):
    deep = checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=7)
    files = checkpoints.eagle3(deep, draft_vocab=15)
    check(deep, files, "eagle3", oracle_of(deep, files, aux_layers=(2, 3, 4)), ragged_prompts)


@pytest.mark.parametrize(
    "options, oracle_options",
    [
        ({}, {}),
        (
            {"norm_before_residual": True, "draft_vocab": 15, "file": TORCH_FILE},
            {"norm_before_residual": True},
        ),
        ({"norm_output": True, "input_norm": True, "rope_theta": 5e2}, {"recycle_normed": True}),
        (
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "norm_output": True,
                "fc_norm": True,
                "eagle_aux_hidden_state_layer_ids": [1, 3, 0],
            },
            {"recycle_normed": False, "aux_layers": (1, 3, 0)},
        ),
        (
            {
                "embedding": "own",
                "hidden_size": 24,
                "head_dim": 10,
                "num_aux": 2,
                "eagle_config": {"layer_ids": [3, 1]},
            },
            {"aux_layers": (3, 1)},
        ),
    ],
    ids=[
        "plain",
        "norm-before-residual-d2t",
        "recycled-norm-input-norm",
        "specforge-fc-norm-explicit-layers",
        "own-width-nested-layers",
    ],
)
def test_eagle3_drafts_in_the_raw_layout(
    checkpoints, ragged_prompts, target, options, oracle_options
):
    files = checkpoints.eagle3(target, **options)
    oracle = oracle_of(target, files, **({"aux_layers": (2, 1, 0)} | oracle_options))
    check(target, files, "eagle3", oracle, ragged_prompts)


@pytest.mark.parametrize("norm_before_residual", [None, False])
def test_eagle3_drafts_in_the_layout_of_speculators(
    checkpoints, ragged_prompts, target, norm_before_residual
):
    says = {} if norm_before_residual is None else {"norm_before_residual": norm_before_residual}
    files = checkpoints.eagle3(target, layout="speculators", draft_vocab=15, **says)
    oracle = oracle_of(
        target,
        files,
        aux_layers=(2, 1, 0),
        decoder=files.config["transformer_layer_config"],
        norm_before_residual=norm_before_residual is None,
    )
    check(target, files, "eagle3", oracle, ragged_prompts)


def test_eagle3_layers_numbered_by_output(checkpoints, ragged_prompts, target):
    files = checkpoints.eagle3(target, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    oracle = oracle_of(target, files, aux_layers=(1, 2, 3))
    check(target, files, "eagle3", oracle, ragged_prompts, aux_id_convention="output")


def test_greedy_drafting_ignores_the_temperature(checkpoints, ragged_prompts, target):
    files = checkpoints.eagle3(target)
    oracle = oracle_of(target, files, aux_layers=(2, 1, 0))
    greedy = GreedyOracle(**vars(oracle))
    check(target, files, "eagle3", greedy, ragged_prompts, draft_sample_method="greedy")


class GreedyOracle(OracleHead):
    """The oracle under draft_sample_method="greedy": noise cannot outweigh its logits."""

    def logits(self, y):
        logits = super().logits(y)
        return torch.where(logits == logits.max(), 1e9, logits)


def test_drafts_are_edited_as_the_target_will_be(checkpoints, ragged_prompts, target, asked):
    """By what stands and the drafts before; over ids of the target, though the head has fewer."""
    files = checkpoints.eagle3(target, draft_vocab=15)
    oracle = oracle_of(target, files, aux_layers=(2, 1, 0))
    edits = {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.2,
        "logit_bias": {3: 1.5, 8: -2.0},
        "top_k": 6,
        "top_p": 0.95,
    }
    check(target, files, "eagle3", oracle, ragged_prompts, edits=edits, asked=asked)


# --- the cache of the head, kept in step ----------------------------------------------------------


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_drafts_stay_true_when_k_changes_and_slots_change_hands(
    checkpoints, ragged_prompts, target, method
):
    """Steps without drafts must still keep the head's cache true, in whatever slot it is."""
    files = getattr(checkpoints, method)(target)
    oracle = oracle_of(target, files)
    if method == "eagle3":
        oracle = replace(oracle, aux_layers=(2, 1, 0))
    policy = CyclicPolicy((3, 0, 2))
    num_seqs = {"eagle": 1, "eagle3": 2}[method]
    check(target, files, method, oracle, ragged_prompts, policy=policy, num_seqs=num_seqs)
    assert policy.num_steps > 20
