"""Tunix's configs, tokenizers and calls, as requests of an engine on a simulated device."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tunix_stub import BOS, CONFIG, EOS, OPTIONS, PAD, Config, Letters, Mode

from specjax.rl.tunix import TunixRollout

pytestmark = pytest.mark.usefixtures("simulated_device")

# Lengths come from the config.
UNSIZED = {name: value for name, value in OPTIONS.items() if name != "max_model_len"}


@pytest.fixture(scope="module")
def rollout(target):
    made = TunixRollout(
        rollout_actor=None,
        tokenizer=Letters(),
        mesh=None,
        rollout_config=CONFIG,
        model=target.folder,
        **UNSIZED,
    )
    yield made
    made.close()


def test_logprobs_are_there_if_asked_for(rollout):
    output = rollout.generate(["a"], replace(CONFIG, return_logprobs=False))
    assert output.logprobs is None


def drawn(rollout, seed, prompts=("seeded", "seeded", "other")):
    output = rollout.generate(list(prompts), replace(CONFIG, seed=seed), min_tokens=8)
    return [tokens.tolist() for tokens in output.tokens]


def run(target, given, **options):
    """What a new rollout draws for a prompt, two micro batches of a step and then another step."""
    made = TunixRollout(None, Letters(), None, CONFIG, model=target.folder, **UNSIZED, **options)
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


def test_ends_of_sequence_end_an_output_as_its_last_token(rollout):
    greedy = replace(CONFIG, temperature=0.0)
    outputs = rollout.generate(list("prompts"), greedy).tokens
    place, free = next((i, x.tolist()) for i, x in enumerate(outputs) if len(x) > 4)
    prompt = "prompts"[place]
    output = rollout.generate([prompt], replace(greedy, eos_tokens=[free[3], EOS]))
    first = free.index(free[3])
    assert output.tokens[0].tolist() == free[: first + 1]


def test_long_prompts_widen_all_to_a_power_of_two(rollout):
    output = rollout.generate(["long prompt", "s"], replace(CONFIG, max_prompt_length=4))
    assert output.left_padded_prompt_tokens.shape == (2, 16)
    assert output.left_padded_prompt_tokens[0, -11:].tolist() == Letters().encode("long prompt")


def test_what_does_not_fit_is_refused_rather_than_cut(rollout):
    with pytest.raises(ValueError, match=r"=12 after .* 17 tokens exceeds max_model_len=28"):
        rollout.generate(["s", "x" * 17], CONFIG)


def test_prompts_begin_once(target):
    tokenizer = Letters(bos=BOS)
    made = TunixRollout(None, tokenizer, None, CONFIG, model=target.folder, **UNSIZED)
    with made.engine:
        output = made.generate(["ab", "!!!ab", "!"], CONFIG)  # "!" is the beginning
        rows = [row[row != PAD].tolist() for row in output.left_padded_prompt_tokens]
        assert rows == [[BOS, 1, 2], [BOS, 1, 2], [BOS]]
        assert made.pad_id() == PAD and made.eos_id() == EOS


def test_prompts_that_begin_with_the_padding_are_refused(target, rollout):
    with pytest.raises(ValueError, match="begins every prompt with its padding, token 1, which"):
        TunixRollout(None, Letters(bos=1, pad=1), None, CONFIG, model=target.folder)
    with pytest.raises(ValueError, match=f"a prompt begins with the padding, token {PAD}"):
        rollout.generate(["x", "~x"], CONFIG)  # "~" is the padding


def test_tunix_finds_no_model_that_shares_the_actors_weights(rollout):
    assert rollout.model() is None  # else it would never call update_params


def test_all_modes_count_for_lengths(target):
    longer = replace(CONFIG, max_tokens_to_generate=40, temperature=0.3)
    config = {Mode.EVAL: longer, Mode.TRAIN: CONFIG}
    made = TunixRollout(None, Letters(), None, config, model=target.folder, **UNSIZED)
    with made.engine:
        made.generate(["x" * 16], longer)
        with pytest.raises(ValueError, match="max_model_len=56"):
            made.generate(["x" * 17], longer)
    with pytest.raises(ValueError, match="has the modes Mode.EVAL; add Mode.TRAIN"):
        TunixRollout(None, Letters(), None, {Mode.EVAL: longer}, model=target.folder)


def test_a_config_needs_no_defaults(target):
    @dataclass(frozen=True, kw_only=True)
    class Strict(Config):
        name: str

    config = Strict(name="mine", rollout_vllm_hbm_utilization=0.5)
    with pytest.raises(ValueError, match="rollout_vllm_hbm_utilization=0.5: leave it out"):
        TunixRollout(None, Letters(), None, config, model=target.folder)


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
