"""The adapter for Tunix: against a stub of its classes, and against Tunix where it is installed.

pip install --no-deps google-tunix jaxtyping wadler-lindig immutabledict
"""

import importlib
import importlib.util
import sys
import warnings
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from specjax.device.models.registry import load_model
from specjax.rl import tunix as adapter
from specjax.rl.nnx import Policy
from specjax.rl.tunix import RolloutOutput, TunixRollout
from specjax.sampling_params import SamplingParams


@dataclass(frozen=True)
class Config:
    """The fields of Tunix's RolloutConfig that matter here, with its defaults."""

    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    kv_cache_size: int = 1024
    data_type: Any = None
    eos_tokens: list[int] | None = None
    rollout_mapping_config: Any = None
    tensor_parallel_size: int = -1
    data_parallel_size: int = -1
    expert_parallel_size: int = 1
    return_logprobs: bool = False
    rollout_vllm_hbm_utilization: float = 0.2
    rollout_vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    rollout_sglang_jax_page_size: int = 128


class Letters:
    """A tokenizer with Tunix's methods: a letter's token is its code less 32; 0 begins, 95 ends."""

    def __init__(self, bos: int | None = None, pad: int = 94):
        self.bos, self.pad = bos, pad

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(32 + i) for i in ids)

    def bos_id(self) -> int | None:
        return self.bos

    def eos_id(self) -> int:
        return 95

    def pad_id(self) -> int:
        return self.pad


CONFIG = Config(max_tokens_to_generate=12, max_prompt_length=16, return_logprobs=True)
OPTIONS = {"max_num_seqs": 4, "page_size": 4, "num_pages": 64, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def policy(target):
    return Policy(*load_model(target.folder, np.dtype("float32")))


@pytest.fixture(scope="module")
def rollout(target, policy):
    made = partial(TunixRollout, model=target.folder, **OPTIONS)(
        rollout_actor=policy, tokenizer=Letters(), mesh=None, rollout_config=CONFIG
    )
    yield made
    made.close()


def reference_logps(target, prompt, tokens, temperature):
    """Of each token, by transformers in fp32."""
    import torch

    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = target.hf(ids).logits[0, len(prompt) - 1 : -1] / temperature
    chosen = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return chosen.numpy()


def test_the_output_is_tunixs(rollout, target):
    prompts = ["Hello", "a longer one", "x"]
    output = rollout.generate(prompts, CONFIG)
    assert output.logits is None
    assert [field.name for field in fields(output)] == [
        field.name for field in fields(RolloutOutput)
    ]
    assert output.left_padded_prompt_tokens.shape == (3, 16)
    assert output.left_padded_prompt_tokens.dtype == np.int32
    for prompt, padded, tokens, text, logprobs in zip(
        prompts,
        output.left_padded_prompt_tokens,
        output.tokens,
        output.text,
        output.logprobs,
        strict=True,
    ):
        ids = Letters().encode(prompt)
        assert padded.tolist() == [94] * (16 - len(ids)) + ids
        assert tokens.dtype == np.int32 and text == Letters().decode(tokens.tolist())
        assert len(tokens) == 12 or tokens[-1] == 95
        expected = reference_logps(target, ids, tokens.tolist(), 0.9)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_logprobs_are_there_if_asked_for(rollout):
    output = rollout.generate(["a"], replace(CONFIG, return_logprobs=False))
    assert output.logprobs is None


def test_greedy_is_what_transformers_says(rollout, target):
    import torch

    output = rollout.generate(["greedy"], replace(CONFIG, temperature=0.0))
    ids = torch.tensor([Letters().encode("greedy")])
    expected = target.hf.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=95)
    assert output.tokens[0].tolist() == expected[0, ids.shape[1] :].tolist()


def test_equal_prompts_are_samples_of_one_request(rollout, monkeypatch):
    calls = []
    generate = rollout.engine.generate
    monkeypatch.setattr(
        rollout.engine, "generate", lambda *given: calls.append(given) or generate(*given)
    )
    prompts = ["one", "two", "one", "one", "two", "three"]
    output = rollout.generate(prompts, replace(CONFIG, seed=3))
    ((asked, params),) = calls
    assert asked == [Letters().encode(text) for text in ("one", "two", "three")]
    assert [one.n for one in params] == [3, 2, 1]
    assert len({tuple(tokens) for tokens in output.tokens}) == 6  # all drawn differently
    for prompt, padded, tokens, logprobs in zip(
        prompts, output.left_padded_prompt_tokens, output.tokens, output.logprobs, strict=True
    ):
        ids = Letters().encode(prompt)
        assert padded[-len(ids) :].tolist() == ids
        (score,) = rollout.engine.score([(ids, tokens.tolist())], SamplingParams(temperature=0.9))
        np.testing.assert_allclose(score.logprobs, logprobs, atol=1e-4)


def drawn(rollout, seed, prompts=("seeded", "seeded", "other")):
    output = rollout.generate(list(prompts), replace(CONFIG, seed=seed))
    return [tokens.tolist() for tokens in output.tokens]


def run(target, given, **options):
    """What a new rollout draws for a prompt, two micro batches of a step and then another step."""
    made = TunixRollout(None, Letters(), None, CONFIG, model=target.folder, **OPTIONS, **options)
    with made.engine:
        return [tokens for _ in range(3) for tokens in drawn(made, given, ["seeded", "seeded"])]


@pytest.mark.parametrize(
    "make", [lambda i: i, lambda i: jax.random.key(i), lambda i: jax.random.PRNGKey(i)]
)
def test_a_seed_fixes_a_run_whose_samples_all_differ(target, make):
    samples = run(target, make(7))
    assert len({tuple(tokens) for tokens in samples}) == 6
    assert run(target, make(7)) == samples
    assert not {*map(tuple, run(target, make(8)))} & {*map(tuple, samples)}


def test_without_a_seed_the_engines_fixes_a_run(target):
    samples = run(target, None, seed=3)
    assert len({tuple(tokens) for tokens in samples}) == 6
    assert run(target, None, seed=3) == samples != run(target, None)


def test_calls_may_ask_for_anything_without_compiling(rollout, compilations):
    rollout.generate(["warm up"], replace(CONFIG, top_k=3, top_p=0.9))
    with compilations.none_expected():
        output = rollout.generate(
            ["shorter", "and another"],
            replace(CONFIG, max_tokens_to_generate=5, temperature=0.3, top_k=7, top_p=None),
        )
        assert all(len(tokens) <= 5 for tokens in output.tokens)
        rollout.generate(["q"], replace(CONFIG, top_k=-1, max_prompt_length=3, seed=1))


def test_ends_of_sequence_end_an_output_as_its_last_token(rollout):
    greedy = replace(CONFIG, temperature=0.0)
    free = rollout.generate(["stop"], greedy).tokens[0].tolist()
    output = rollout.generate(["stop"], replace(greedy, eos_tokens=[free[3], 95]))
    first = free.index(free[3])
    assert output.tokens[0].tolist() == free[: first + 1]


def test_long_prompts_widen_all_to_a_power_of_two(rollout):
    output = rollout.generate(["long prompt", "s"], replace(CONFIG, max_prompt_length=4))
    assert output.left_padded_prompt_tokens.shape == (2, 16)
    assert output.left_padded_prompt_tokens[0, -11:].tolist() == Letters().encode("long prompt")


def test_what_does_not_fit_is_refused_rather_than_cut(rollout):
    with pytest.raises(ValueError, match=r"=12 after .* 17 tokens exceeds max_model_len=28"):
        rollout.generate(["s", "x" * 17], CONFIG)


def test_prompts_begin_once(target, policy):
    tokenizer = Letters(bos=1)
    made = TunixRollout(
        None, tokenizer, None, CONFIG, model=target.folder, max_num_seqs=2, num_pages=32
    )
    with made.engine:
        output = made.generate(["ab", "!!!ab", "!"], CONFIG)  # "!" is the beginning
        rows = [row[row != 94].tolist() for row in output.left_padded_prompt_tokens]
        assert rows == [[1, 65, 66], [1, 65, 66], [1]]
        assert made.pad_id() == 94 and made.eos_id() == 95


def test_more_of_sampling_params_may_be_given(rollout):
    output = rollout.generate(["bias"], CONFIG, logit_bias={50: 1e4})
    assert set(output.tokens[0].tolist()) == {50}
    with pytest.raises(ValueError, match="generate takes no beam_size, seed; of SamplingParams"):
        rollout.generate(["x"], CONFIG, beam_size=2, seed=1)


def test_prompts_that_begin_with_the_padding_are_refused(target, rollout):
    with pytest.raises(ValueError, match="begins every prompt with its padding, token 1, which"):
        TunixRollout(None, Letters(bos=1, pad=1), None, CONFIG, model=target.folder)
    with pytest.raises(ValueError, match="a prompt begins with the padding, token 94"):
        rollout.generate(["x", "~x"], CONFIG)  # "~" is the padding


@pytest.mark.parametrize("pad", [94, 95])
def test_logps_are_recomputed_at_the_temperature_of_training(target, rollout, monkeypatch, pad):
    monkeypatch.setattr(rollout._tokenizer, "pad", pad)
    rollout.generate(["x"], replace(CONFIG, temperature=0.3, top_k=5))  # to evaluate
    prompts = [[3, pad, 5], [7], [9, 8, 7, 6, 5]]
    completions = [[10, 11, 95], [12, 13, 14, 15], [95]]
    padded = np.array([[pad] * (6 - len(p)) + p for p in prompts])
    tokens = np.array([c + [pad] * (5 - len(c)) for c in completions])
    found = rollout.get_per_token_logps(jnp.asarray(padded), jnp.asarray(tokens))
    assert found.shape == (3, 5) and found.dtype == jnp.float32
    for row, prompt, completion in zip(found, prompts, completions, strict=True):
        expected = reference_logps(target, prompt, completion, 0.9)
        np.testing.assert_allclose(row[: len(completion)], expected, atol=1e-4)
        if pad != 95:
            assert not np.any(row[len(completion) :])


def test_an_empty_completion_has_no_logps(rollout):
    assert not np.any(rollout.get_per_token_logps(np.array([[94, 3]]), np.array([[94, 94]])))


def scaled(state, factor):
    return jax.tree.map(lambda x: x * factor, state)


def test_every_update_is_a_new_version(rollout, policy, compilations):
    state = nnx.state(policy, nnx.Param)
    version = rollout.engine.version

    def logprobs():
        return rollout.engine.score([([1, 2, 3], [4, 5, 6])])[0].logprobs.tolist()

    before = logprobs()
    rollout.update_params(scaled(state, 1.3), (nnx.Param,))
    changed = logprobs()
    with compilations.none_expected():
        rollout.update_params(state, (nnx.Param,))
        assert logprobs() == before != changed
    assert rollout.engine.version == version + 2


def test_tunix_finds_no_model_that_shares_the_actors_weights(rollout):
    assert rollout.model() is None  # else it would never call update_params


def test_an_actor_in_the_hosts_memory_is_refused(target):
    actor = Policy(*load_model(target.folder, np.dtype("float32")))
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    nnx.update(actor, jax.device_put(nnx.state(actor), host))
    with pytest.raises(ValueError, match="set offload_to_cpu=False"):
        TunixRollout(actor, Letters(), None, CONFIG, model=target.folder)


def test_updates_pass_tunixs_guard(rollout, policy):
    state = nnx.state(policy, nnx.Param)
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        rollout.update_params(state, (nnx.Param,))


def test_the_actors_other_variables_are_left_out(target):
    class Actor(Policy):
        def __init__(self, *given):
            super().__init__(*given)
            self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))

    actor = Actor(*load_model(target.folder, np.dtype("float32")))
    made = TunixRollout(actor, Letters(), None, CONFIG, model=target.folder, **OPTIONS)
    with made.engine:
        made.update_params(nnx.state(actor))
        assert made.engine.version == 2


def test_the_engine_starts_with_the_actors_weights(checkpoints, target):
    other = checkpoints.target(tie_word_embeddings=True, seed=5)
    actor = Policy(*load_model(other.folder, np.dtype("float32")))
    made = TunixRollout(actor, Letters(), None, CONFIG, model=target.folder, **OPTIONS)
    with made.engine:
        output = made.generate(["start"], replace(CONFIG, temperature=1.0))
        ids = Letters().encode("start")
        expected = reference_logps(other, ids, output.tokens[0].tolist(), 1.0)
        np.testing.assert_allclose(output.logprobs[0], expected, atol=1e-4)


class Llama3(nnx.Module):
    """Parameters under the names and in the shapes of Tunix's class, with an adapter on q."""

    def __init__(self, folder, *, rank=0):
        from safetensors.numpy import load_file

        def node(**children):
            module = nnx.Module()
            for name, child in children.items():
                setattr(module, name, child)
            return module

        x = load_file(folder / "model.safetensors")

        def param(name, *shape):
            array = x[name].T.reshape(shape) if shape else x[name]
            return nnx.Param(jnp.asarray(array))

        def layer(name):
            attention, mlp = f"{name}.self_attn", f"{name}.mlp"
            projections = {
                "q_proj": node(w=param(f"{attention}.q_proj.weight", 32, 4, 8)),
                "k_proj": node(w=param(f"{attention}.k_proj.weight", 32, 2, 8)),
                "v_proj": node(w=param(f"{attention}.v_proj.weight", 32, 2, 8)),
                "o_proj": node(w=param(f"{attention}.o_proj.weight", 4, 8, 32)),
            }
            if rank:
                keys = iter(jax.random.split(jax.random.key(len(name)), 2))
                q = projections["q_proj"]
                q.w_lora_a = nnx.LoRAParam(jax.random.normal(next(keys), (32, rank)))
                q.w_lora_b = nnx.LoRAParam(jax.random.normal(next(keys), (rank, 4, 8)))
            return node(
                attn=node(**projections),
                mlp=node(
                    gate_proj=node(kernel=param(f"{mlp}.gate_proj.weight", 32, 48)),
                    up_proj=node(kernel=param(f"{mlp}.up_proj.weight", 32, 48)),
                    down_proj=node(kernel=param(f"{mlp}.down_proj.weight", 48, 32)),
                ),
                input_layernorm=node(w=param(f"{name}.input_layernorm.weight")),
                post_attention_layernorm=node(w=param(f"{name}.post_attention_layernorm.weight")),
            )

        self.embedder = node(input_embedding=param("model.embed_tokens.weight"))
        self.layers = nnx.List([layer(f"model.layers.{i}") for i in range(2)])
        self.final_norm = node(w=param("model.norm.weight"))


def test_tunixs_models_are_known_by_their_class(checkpoints, target):
    other = checkpoints.target(tie_word_embeddings=True, seed=5)
    made = TunixRollout(
        Llama3(other.folder), Letters(), None, CONFIG, model=target.folder, **OPTIONS
    )
    _, params = load_model(other.folder, np.dtype("float32"))
    with made.engine:
        jax.tree.map(np.testing.assert_array_equal, made.engine.params.target, params)


def test_adapters_are_merged_at_every_update(target):
    actor = Llama3(target.folder, rank=2)
    with pytest.raises(ValueError, match="pass lora_scale=alpha / rank"):
        TunixRollout(actor, Letters(), None, CONFIG, model=target.folder, **OPTIONS)
    made = TunixRollout(
        actor, Letters(), None, CONFIG, model=target.folder, lora_scale=0.25, **OPTIONS
    )
    with made.engine:
        q = actor.layers[1].attn.q_proj
        q.w_lora_a[...] = q.w_lora_a[...] * 3
        made.update_params(nnx.state(actor, nnx.LoRAParam), (nnx.LoRAParam,))
        delta = np.einsum("dr,rnh->dnh", q.w_lora_a[...], q.w_lora_b[...])
        expected = (np.asarray(q.w[...]) + 0.25 * delta).reshape(32, 32)
        found = made.engine.params.target.layers[1].attention.qkv[:, :32]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


BAD = [
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: leave it at -1 or 1"),
    ({"data_parallel_size": 4}, "data_parallel_size=4"),
    ({"expert_parallel_size": 2}, "expert_parallel_size=2"),
    ({"rollout_vllm_hbm_utilization": 0.5}, "rollout_vllm_hbm_utilization=0.5: leave it out"),
    ({"rollout_vllm_kwargs": {"x": 1}}, "rollout_vllm_kwargs={'x': 1}"),
    ({"rollout_sglang_jax_page_size": 64}, "rollout_sglang_jax_page_size=64"),
    ({"rollout_mapping_config": {}}, "rollout_mapping_config={}: give TunixRollout names"),
    ({"top_p": 2.0}, "top_p=2.0"),
    ({"eos_tokens": [-5]}, "-5"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_what_the_engine_lacks_is_refused_at_construction(target, change, message):
    config = {"train": CONFIG, "eval": replace(CONFIG, **change)}
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        TunixRollout(None, Letters(), None, config, model=target.folder)


def test_all_that_is_refused_is_listed(target):
    config = replace(CONFIG, tensor_parallel_size=2, rollout_sglang_jax_page_size=64)
    with pytest.raises(ValueError, match="tensor_parallel_size=2.*rollout_sglang_jax_page_size=64"):
        TunixRollout(None, Letters(), None, config, model=target.folder)


def test_bad_arguments_are_refused_at_construction(target):
    def make(tokenizer=None, mesh=None, config=CONFIG, **options):
        tokenizer = Letters() if tokenizer is None else tokenizer
        return TunixRollout(None, tokenizer, mesh, config, model=target.folder, **options)

    with pytest.raises(ValueError, match="no methods bos_id, eos_id, pad_id; wrap it in"):
        make(tokenizer=type("T", (), {"encode": print, "decode": print})())
    wide = type("Mesh", (), {"devices": np.array(jax.devices() * 2)})
    with pytest.raises(ValueError, match="give Role.ROLLOUT a mesh of that device"):
        make(mesh=wide)
    with pytest.raises(ValueError, match="max_model_len=20 is less than .*=28; raise it"):
        make(max_model_len=20)
    with pytest.raises(ValueError, match="ask for bfloat16 and float32"):
        make(config=replace(CONFIG, data_type=jnp.bfloat16), dtype="float32")
    with pytest.raises(ValueError, match="exact=True engines score no tokens"):
        make(exact=True)
    with pytest.raises(TypeError, match="max_seqs"):
        make(max_seqs=3)


def test_an_actor_that_does_not_fit_is_refused_at_construction(checkpoints, target):
    other = checkpoints.target(tie_word_embeddings=True, hidden_size=16)
    actor = Policy(*load_model(other.folder, np.dtype("float32")))
    with pytest.raises(ValueError, match="wrong shape"):
        TunixRollout(actor, Letters(), None, CONFIG, model=target.folder, **OPTIONS)


class Mode(Enum):
    """Tunix's modes."""

    TRAIN = "train"
    EVAL = "eval"


def test_all_modes_count_for_lengths_and_training_for_its_temperature(target):
    longer = replace(CONFIG, max_tokens_to_generate=40, temperature=0.3)
    config = {Mode.EVAL: longer, Mode.TRAIN: CONFIG}
    made = TunixRollout(None, Letters(), None, config, model=target.folder, **OPTIONS)
    with made.engine:
        made.generate(["x" * 16], longer)
        found = made.get_per_token_logps(np.array([[94, 3]]), np.array([[4, 5]]))
        np.testing.assert_allclose(found[0], reference_logps(target, [3], [4, 5], 0.9), atol=1e-4)
    with pytest.raises(ValueError, match="has the modes Mode.EVAL; add Mode.TRAIN"):
        TunixRollout(None, Letters(), None, {Mode.EVAL: longer}, model=target.folder)


def test_a_config_needs_no_defaults(target):
    @dataclass(frozen=True, kw_only=True)
    class Strict(Config):
        name: str

    config = Strict(name="mine", rollout_vllm_hbm_utilization=0.5)
    with pytest.raises(ValueError, match="rollout_vllm_hbm_utilization=0.5: leave it out"):
        TunixRollout(None, Letters(), None, config, model=target.folder)


KINDS = [("llama3", "Llama3", "llama"), ("qwen2", "Qwen2", "qwen2"), ("qwen3", "Qwen3", "qwen3")]


@pytest.fixture
def tunix():
    """Tunix's own base_rollout; its package imports far more, so it is stood in for."""
    spec = importlib.util.find_spec("tunix")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("google-tunix is not installed")
    stand_in = ModuleType("tunix")
    stand_in.__path__ = list(spec.submodule_search_locations)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Tunix's own code
        patch.setitem(sys.modules, "tunix", stand_in)
        patch.setattr(adapter, "_tunix", importlib.import_module("tunix.rl.rollout.base_rollout"))
        adapter._register()
        yield adapter._tunix
    for name in [name for name in sys.modules if name.partition(".")[0] == "tunix"]:
        del sys.modules[name]


def test_tunix_takes_it_for_one_of_its_own(tunix, target):
    assert issubclass(TunixRollout, tunix.BaseRollout)
    config = tunix.RolloutConfig(max_tokens_to_generate=5, max_prompt_length=8)
    made = TunixRollout(None, Letters(), None, config, model=target.folder, **OPTIONS)
    with made.engine:
        assert all(callable(getattr(made, name)) for name in tunix.BaseRollout.__abstractmethods__)
        assert isinstance(made.generate(["a", "b"], config), tunix.RolloutOutput)
    ours, theirs = fields(RolloutOutput), fields(tunix.RolloutOutput)
    assert [one.name for one in ours] == [one.name for one in theirs]
    with pytest.raises(ValueError, match="rollout_vllm_model_version='x'"):
        config = tunix.RolloutConfig(rollout_vllm_model_version="x")
        TunixRollout(None, Letters(), None, config, model=target.folder)


def tunix_actor(files, module, name):
    """Tunix's model with random parameters, in the sizes of a tiny checkpoint."""
    models = importlib.import_module(f"tunix.models.{module}.model")
    sizes = dict(num_layers=2, vocab_size=96, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8)
    config = models.ModelConfig(
        **sizes, num_kv_heads=2, rope_theta=1_000_000, norm_eps=files.hf.config.rms_norm_eps
    )
    actor = getattr(models, name)(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def noise(x):
        return jnp.asarray(0.3 * rng.normal(size=x.shape) + (x.ndim == 1), jnp.float32)

    nnx.update(actor, jax.tree.map(noise, nnx.state(actor, nnx.Param)))
    return actor


# Tunix's Llama3 (0.1.7) rotates by this base, whatever its config says.
ROPE = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize("module, name, kind", KINDS)
def test_rollouts_of_tunixs_models_have_their_logprobs(tunix, checkpoints, module, name, kind):
    files = checkpoints.target(kind, head_dim=8, rope_parameters=ROPE)
    actor = tunix_actor(files, module, name)
    made = TunixRollout(actor, Letters(), None, CONFIG, model=files.folder, **OPTIONS)
    with made.engine:
        ids, output = Letters().encode("real"), made.generate(["real"], CONFIG)
    tokens = jnp.array([[*ids, *output.tokens[0].tolist()]])
    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    logits, _ = actor(tokens, jnp.arange(length)[None], None, mask)
    logps = jax.nn.log_softmax(logits[0, len(ids) - 1 : -1] / CONFIG.temperature)
    chosen = jnp.take_along_axis(logps, tokens[0, len(ids) :, None], axis=1)[:, 0]
    np.testing.assert_allclose(output.logprobs[0], chosen, atol=1e-3)


def test_tunixs_cluster_generates_scores_and_syncs(tunix, checkpoints):
    try:
        clusters = importlib.import_module("tunix.rl.rl_cluster")
        utils = importlib.import_module("tunix.rl.utils")
    except ImportError as error:
        pytest.skip(f"the cluster needs all that google-tunix depends on: {error}")
    files = checkpoints.target("qwen2", head_dim=8, rope_parameters=ROPE)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT
    config = clusters.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=partial(TunixRollout, model=files.folder, **OPTIONS),
        training_config=clusters.RLTrainingConfig(
            actor_optimizer=optax.sgd(0.1), eval_every_n_steps=1, max_steps=1
        ),
        rollout_config=tunix.RolloutConfig(
            max_tokens_to_generate=8, max_prompt_length=8, return_logprobs=True
        ),
    )
    cluster = clusters.RLCluster(
        actor=tunix_actor(files, "qwen2", "Qwen2"), tokenizer=Letters(), cluster_config=config
    )
    with cluster.rollout.engine as engine:
        output = cluster.generate(["hello", "hello", "world"], micro_batch_size=2)
        tokens = np.full((3, 8), 94)
        for row, found in zip(tokens, output.tokens, strict=True):
            row[: len(found)] = found
        given = jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(tokens)
        recomputed = cluster.get_old_per_token_logps(*given)
        trainers = cluster.get_actor_per_token_logps(*given, 94, 95, temperature=0.9)
        for i, logprobs in enumerate(output.logprobs):
            np.testing.assert_allclose(recomputed[i, : len(logprobs)], logprobs, atol=1e-4)
            np.testing.assert_allclose(trainers[i, : len(logprobs)], logprobs, atol=1e-3)
        assert not utils.is_sharing_weights(cluster.actor_trainer.model, cluster.rollout.model())
        cluster.sync_weights()
        assert engine.version == 2
