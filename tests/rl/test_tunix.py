"""Tunix's configs, tokenizers and calls become requests of an engine on a simulated device."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import SIZES
from support.tunix_stub import BOS, CONFIG, EOS, PAD, Config, Letters, Mode, made

from specjax.rl import RolloutHistory

pytestmark = pytest.mark.usefixtures("simulated_device")

UNSIZED = {name: value for name, value in SIZES.items() if name != "max_model_len"}


@pytest.fixture(scope="module")
def open_rollout(target):
    """Return a function that makes rollout engines. Their maximum lengths come from the config."""
    opened = []

    def make(*arguments, **options):
        opened.append(made(target, *arguments, sizes=UNSIZED, **options))
        return opened[-1]

    yield make
    for rollout in opened:
        rollout.close()


@pytest.fixture(scope="module")
def rollout(open_rollout):
    return open_rollout()


def test_logprobs_are_there_if_asked_for(rollout):
    output = rollout.generate(["a"], replace(CONFIG, return_logprobs=False))
    assert output.logprobs is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda i: i, lambda i: jax.random.key(i), lambda i: jax.random.PRNGKey(i), None]
)
def test_a_seed_fixes_a_run_whose_samples_all_differ(open_rollout, make):
    """A run has two micro batches of a step, then another step.

    The default is the engine's seed.
    """

    def run(number):
        seed, own = (None, number) if make is None else (make(number), 0)
        new = open_rollout(seed=own)
        config = replace(CONFIG, seed=seed)
        calls = [new.generate(["seeded"] * 2, config, min_tokens=8) for _ in range(3)]
        return [tuple(tokens.tolist()) for output in calls for tokens in output.tokens]

    samples = run(7)
    assert len(set(samples)) == 6 and run(7) == samples
    assert not {*run(8)} & {*samples}


def test_a_history_changes_no_rollout(open_rollout):
    """The history gives drafts, over several calls and updates of the weights."""
    suffix, greedy = {"method": "suffix", "num_speculative_tokens": 3}, []
    for history in None, RolloutHistory():
        new = open_rollout(speculative_config=suffix, history=history)
        for _ in range(2):
            output = new.generate(["history"] * 2, replace(CONFIG, temperature=0.0))
            greedy.append([tokens.tolist() for tokens in output.tokens])
    assert greedy[:2] == greedy[2:]
    assert new.engine.metrics().accepted_tokens_per_source["history"] > 0


def test_ends_of_sequence_end_an_output_as_its_last_token(rollout):
    greedy = replace(CONFIG, temperature=0.0)
    outputs = rollout.generate(list("prompts"), greedy).tokens
    place, free = next((i, x.tolist()) for i, x in enumerate(outputs) if len(x) > 4)
    output = rollout.generate(["prompts"[place]], replace(greedy, eos_tokens=[free[3], EOS]))
    assert output.tokens[0].tolist() == free[: free.index(free[3]) + 1]


def test_long_prompts_widen_all_to_a_power_of_two(rollout):
    output = rollout.generate(["long prompt", "s"], replace(CONFIG, max_prompt_length=4))
    assert output.left_padded_prompt_tokens.shape == (2, 16)
    assert output.left_padded_prompt_tokens[0, -11:].tolist() == Letters().encode("long prompt")


def test_prompts_begin_once(open_rollout):
    begins = open_rollout(tokenizer=Letters(bos=BOS))
    output = begins.generate(["ab", "!!!ab", "!"], CONFIG)  # "!" is the beginning
    rows = [row[row != PAD].tolist() for row in output.left_padded_prompt_tokens]
    assert rows == [[BOS, 1, 2], [BOS, 1, 2], [BOS]]
    assert begins.pad_id() == PAD and begins.eos_id() == EOS


def test_tunix_finds_no_model_that_shares_the_actors_weights(rollout):
    assert rollout.model() is None  # else it would never call update_params


LONGER = replace(CONFIG, max_tokens_to_generate=40, temperature=0.3)


def test_all_modes_count_for_lengths(open_rollout):
    modes = open_rollout({Mode.EVAL: LONGER, Mode.TRAIN: CONFIG})
    modes.generate(["x" * 16], LONGER)
    with pytest.raises(ValueError, match="max_model_len=56"):
        modes.generate(["x" * 17], LONGER)


def test_calls_that_cannot_be_served(rollout):
    with pytest.raises(ValueError, match=r"=12 after .* 17 tokens exceeds max_model_len=28"):
        rollout.generate(["s", "x" * 17], CONFIG)
    with pytest.raises(ValueError, match=f"a prompt begins with the padding, token {PAD}"):
        rollout.generate(["x", "~x"], CONFIG)  # "~" is the padding
    with pytest.raises(ValueError, match="generate takes no beam_size, seed; of SamplingParams"):
        rollout.generate(["x"], CONFIG, beam_size=2, seed=1)


@dataclass(frozen=True, kw_only=True)
class Strict(Config):
    """A config with a field that has no default."""

    name: str


WIDE = type("Mesh", (), {"devices": np.array(jax.devices() * 2)})
HALF = type("T", (), {"encode": print, "decode": print})()
BAD_CONFIGS = [
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: leave it at -1 or 1"),
    ({"data_parallel_size": 4}, "data_parallel_size=4"),
    ({"expert_parallel_size": 2}, "expert_parallel_size=2"),
    ({"rollout_vllm_hbm_utilization": 0.5}, "rollout_vllm_hbm_utilization=0.5: leave it out"),
    ({"rollout_vllm_kwargs": {"x": 1}}, r"rollout_vllm_kwargs=\{'x': 1}"),
    ({"rollout_mapping_config": {}}, r"rollout_mapping_config=\{}: give TunixRollout names"),
    ({"top_p": 2.0}, "top_p=2.0"),
    ({"eos_tokens": [-5]}, "-5"),
    (
        {"tensor_parallel_size": 2, "rollout_sglang_jax_page_size": 64},  # all is listed
        "tensor_parallel_size=2.*rollout_sglang_jax_page_size=64",
    ),
]
BAD_ARGUMENTS = [
    ({"tokenizer": HALF}, "no methods bos_id, eos_id, pad_id; wrap it in"),
    ({"tokenizer": Letters(bos=1, pad=1)}, "begins every prompt with its padding, token 1, which"),
    ({"mesh": WIDE}, "give Role.ROLLOUT a mesh of that device"),
    ({"max_model_len": 20}, "max_model_len=20 is less than .*=28; raise it"),
    (
        {"config": replace(CONFIG, data_type=jnp.bfloat16), "dtype": "float32"},
        "ask for bfloat16 and float32",
    ),
    ({"exact": True}, "exact=True engines score no tokens"),
    ({"config": {Mode.EVAL: LONGER}}, "has the modes Mode.EVAL; add Mode.TRAIN"),
    (
        {"config": Strict(name="mine", rollout_vllm_hbm_utilization=0.5)},
        "rollout_vllm_hbm_utilization=0.5: leave it out",
    ),
    *(({"config": {"train": CONFIG, "eval": replace(CONFIG, **c)}}, m) for c, m in BAD_CONFIGS),
]


@pytest.mark.parametrize("options, message", BAD_ARGUMENTS, ids=range(len(BAD_ARGUMENTS)))
def test_what_the_engine_lacks_is_refused_at_construction(open_rollout, options, message):
    with pytest.raises(ValueError, match=message):
        open_rollout(**options)
