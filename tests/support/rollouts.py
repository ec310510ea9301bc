"""Sizes, prompts and comparisons for tests of rollouts."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.engines import SIZES
from support.logits import hf_logits

from specjax import SamplingParams
from specjax.rl import Rollout

TOLERANCE = 1e-4
SETTINGS: Mapping[str, Any] = {**SIZES, "seed": 3}
PROMPTS = [[4, 9, 1], [7, 2, 2, 8, 11, 3, 5, 1, 6], [30], list(range(20))]
SAMPLED = SamplingParams(n=2, temperature=1.2, top_p=0.9, max_tokens=20)


def made_rollout(prompt: Any, output: Any, logprobs: Any, **fields: Any) -> Rollout:
    """Return a rollout with these tokens. `fields` replace the default values of other fields."""
    usual = {"raw_logprobs": None, "versions": (), "finish_reason": "stop", "text": None}
    usual |= {"params": SamplingParams(), "seed": 0, "prompt_index": 0, "sample_index": 0}
    return Rollout(
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(output, np.int32),
        logprobs=np.array(logprobs, np.float32),
        **usual | fields,
    )


def lasting(*lengths: int) -> list[SamplingParams]:
    """Return sampling parameters per prompt, with which its output has exactly the given length."""
    return [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True) for n in lengths]


def noisy(params: Any, seed: int, scale: float = 0.05) -> Any:
    """Return weights with random changes, as after a training step."""
    rng = np.random.default_rng(seed)

    def move(x: Any) -> jax.Array:
        x = np.asarray(x)
        is_float = np.issubdtype(x.dtype, np.floating)
        return jnp.array(x + scale * rng.normal(size=x.shape).astype(x.dtype) if is_float else x)

    return jax.tree.map(move, params)


def copied(tree: Any) -> Any:
    """Return a copy of the arrays in the host's memory."""
    return jax.tree.map(np.array, tree)


def changed(hf: Any, seed: int) -> dict[str, Any]:
    """Change the weights of a transformers model, and return a copy of its state_dict."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in hf.parameters():
            tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    return copy.deepcopy(hf.state_dict())


def logits_of(hf: Any, rollout: Rollout) -> np.ndarray:
    """Return the logits f64[T, V] from which transformers would sample each token of the output."""
    tokens = [*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]
    return hf_logits(hf, [tokens])[0, len(rollout.prompt_token_ids) - 1 : -1].astype(np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def facts(rollout: Rollout) -> dict[str, Any]:
    """Return all fields of a rollout except its log-probabilities.

    The last bits of log-probabilities depend on the other requests in a step.
    """
    kept = {name: x for name, x in vars(rollout).items() if not name.endswith("logprobs")}
    return {name: np.asarray(x).tolist() for name, x in kept.items()}


def assert_same(some: Sequence[Rollout], others: Sequence[Rollout]) -> None:
    """Check that rollouts are equal, and that their log-probabilities are close."""
    assert [*map(facts, some)] == [*map(facts, others)] != []
    assert_close([one.logprobs for one in some], [one.logprobs for one in others], some[0].params)


def assert_close(some: Sequence[Any], others: Sequence[Any], params: SamplingParams) -> None:
    """Check that log-probabilities are close.

    If truncation (top_k, top_p, min_p) excludes tokens, rounding may decide whether a token at the
    threshold is excluded. This changes the probabilities of the other tokens slightly. So a few
    larger differences are allowed then.
    """
    found, expected = np.concatenate(list(some)), np.concatenate(list(others))
    differences = np.abs(found - expected)
    is_cut = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    far = differences[differences > TOLERANCE]
    assert len(far) <= (len(found) // 300 + 1 if is_cut else 0) and (far < 0.1).all()
