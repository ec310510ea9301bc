"""Builds models of published shapes with random weights, and engines that run them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from timing import Setting, spread

from specjax.bench.measure import Run, decode
from specjax.checkpoint.division import DividedSpec
from specjax.config import EngineConfig
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Drafter, NoDrafter, Params
from specjax.device.drafters.eagle import EagleHead
from specjax.device.drafters.mtp import MTPHead
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model
from specjax.device.models.registry import describe_model
from specjax.device.placement import DIVIDED, REPLICATED, Placement, default_device
from specjax.device.verification import Synthetic
from specjax.engine.engine import Engine
from specjax.engine.metrics import Metrics
from specjax.host.request import Request
from specjax.host.speculation.policy import DecodeLoad, Policy, PolicyRule, Round
from specjax.inspect.minimum import minimum_bytes
from specjax.sampling_params import SamplingParams

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TINY_LLAMA = {"num_hidden_layers": 1}
TINY_HYBRID = {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PROMPT, OUTPUT, CHUNK_TOKENS = 128, 112, 2048


@dataclass
class Chosen(PolicyRule):
    """A policy that always chooses `k`, and that records the milliseconds of rounds.

    `k` can be set to any of `choices`, for which rounds are compiled.
    """

    choices: tuple[int, ...]
    k: int = 0
    is_learning: bool = True
    ms: list[float] = field(default_factory=list)

    def choose(self, load: DecodeLoad) -> int:
        """Return `k`."""
        return self.k

    def observe(self, outcome: Round) -> None:
        """Record a round's time if it was measured, and if the round had `k` drafts."""
        if outcome.ms is not None and outcome.k == self.k:
            self.ms.append(outcome.ms)


@dataclass(frozen=True)
class Models:
    """A target and its drafter, with weights."""

    target: Model
    drafter: Drafter
    params: Params
    plain_params: Params  # the target's parameters, without a drafter's


def read_config(name: str, setting: Setting) -> dict[str, Any]:
    """Return a published model's config. For the smoke test, its sizes are tiny."""
    config = json.loads((CONFIGS / name / "config.json").read_text())
    text = config.get("text_config", config)
    if setting.is_cpu:
        text |= TINY | (TINY_HYBRID if text is not config else TINY_LLAMA)
    return config


def make_models(name: str, setting: Setting) -> Models:
    """Make a model and its drafter, with random weights."""
    target, head = describe(name, setting)
    dtype = setting.pick("bfloat16", "float32")
    weights = random_params(target.specs(), dtype, 0), random_params(head.specs(), dtype, 1)
    return Models(target, ChainDrafter(head), Params(*weights), Params(weights[0], None))


def describe(name: str, setting: Setting) -> tuple[Any, Any]:
    """Return a model and its draft head: an EAGLE-1 head for Llama, the MTP module for Qwen3.5."""
    target = describe_model(HFConfig(read_config(name, setting), name))
    return target, EagleHead(shape=target) if name.startswith("Llama") else MTPHead(target)


def random_params(specs: Any, dtype: str, seed: int, placement: Placement | None = None) -> Any:
    """Return random parameters. Matrices keep the scale of their inputs; norms are one.

    Arrays with a `DividedSpec` are divided over the devices of `placement`.
    """
    leaves, tree = jax.tree.flatten(specs)
    placement = placement or Placement.on(default_device())
    places = [
        placement.sharding(DIVIDED if isinstance(spec, DividedSpec) else REPLICATED)
        for spec in leaves
    ]
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(leaves))
    arrays = [
        _random(tuple(spec.shape), jnp.dtype(spec.dtype or dtype).name, place)(key)
        if len(spec.shape) > 1
        else jnp.full(
            spec.shape, 1.0 if spec.fill is None else spec.fill, spec.dtype or dtype, device=place
        )
        for key, spec, place in zip(keys, leaves, places, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


@cache
def _random(shape: tuple[int, ...], dtype: str, place: Sharding) -> Callable[[Any], jax.Array]:
    """Return a function of a key that makes a random matrix at `place`."""

    def make(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape, dtype) * np.asarray(shape[-2] ** -0.5, dtype)

    return jax.jit(make, out_shardings=place)


def make_config(batch: int, setting: Setting, max_drafts: int, **options: Any) -> EngineConfig:
    """Return the config of an engine that just fits `batch` requests; see `lengths`.

    Chunks have one shape, and rounds have one shape, as every shape takes seconds to compile.
    """
    prompt, output = lengths(setting)
    max_model_len = prompt + output + 2 * (max_drafts + 1) + options.pop("room", 0)
    budget = max(min(CHUNK_TOKENS, batch * PROMPT), batch * (max_drafts + 1))
    width = min(budget, PROMPT, max_model_len)
    most = min(budget, batch * max_model_len)  # maximum number of prompt tokens in a step
    fields = {
        "max_model_len": max_model_len,
        "max_num_seqs": batch,
        "max_num_batched_tokens": budget,
        "decode_batches": (batch,),
        "prefill_shapes": ((-(-most // width), width),),
        "num_pages": batch * -(-max_model_len // 16),
        "compile_ahead": True,
        "enable_prefix_caching": False,
        "num_snapshots": 1,
        "dtype": setting.pick("bfloat16", "float32"),
        "kernels": "auto",
        "max_logprobs": 1,
    }
    return EngineConfig(**fields | options)


def lengths(setting: Setting) -> tuple[int, int]:
    """Return the length of every prompt and the length of every output, in tokens."""
    return setting.pick((PROMPT, OUTPUT), (8, 12))


def make_engine(
    models: Models,
    batch: int,
    policy: Policy,
    rates: Sequence[float],
    setting: Setting,
    *,
    is_plain: bool = False,
    placement: Placement | None = None,
    **options: Any,
) -> Engine:
    """Return an engine for `batch` requests.

    Its drafts are accepted at the synthetic `rates`. If `is_plain`, it has no drafter.
    """
    config = make_config(batch, setting, max(policy.choices, default=0), **options)
    if is_plain:
        return Engine(config, models.target, NoDrafter(), models.plain_params, policy)
    verification = Synthetic(tuple(rates))
    return Engine(
        config,
        models.target,
        models.drafter,
        models.params,
        policy,
        verification,
        placement=placement,
    )


def make_requests(
    batch: int, vocab_size: int, output: int, setting: Setting, *, num_prompt: int | None = None
) -> list[Request]:
    """Return greedy requests with random prompts, which ignore the end of sequence."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    prompts = rng.integers(0, vocab_size, (batch, num_prompt or lengths(setting)[0])).tolist()
    return [Request(i, tuple(p), params, output, (i,)) for i, p in enumerate(prompts)]


def measure_engine(engine: Engine, policy: Chosen, k: int, setting: Setting) -> dict[str, Any]:
    """Measure a full batch with K = `k`: milliseconds per step and per token."""
    policy.k, batch = k, engine.config.max_num_seqs
    vocab_size = engine.target.vocab_size
    decode(engine, make_requests(batch, vocab_size, 6, setting))  # touches memory
    policy.ms.clear()
    before = engine.metrics()
    requests = make_requests(batch, vocab_size, lengths(setting)[1], setting)
    runs = [decode(engine, requests) for _ in range(2)]
    after = engine.metrics()
    return {
        "k": k,
        "batch": batch,
        "ms_per_step": min(run.ms_per_step for run in runs),
        "ms_per_token": min(run.ms_per_token for run in runs),
        "runs_ms_per_step": [run.ms_per_step for run in runs],
        "rounds_ms": spread(policy.ms) if policy.ms else None,
        "tokens_per_second": max(run.tokens_per_second for run in runs),
        "accepted_per_pos": _accepted(runs),
        **_per_step(before, after),
        "late_compilations": after.num_compiles_after_warmup,
    }


def step_floor(models: Models, batch: int, k: int, setting: Setting) -> int:
    """Return the minimum number of bytes that a step in the middle of an output must move."""
    prompt, output = lengths(setting)
    return minimum_bytes(
        models.target,
        models.drafter,
        models.params if k else models.plain_params,
        batch=batch,
        k=k,
        context=prompt + output // 2,
        dtype=setting.pick("bfloat16", "float32"),
    ).step


def free(engine: Engine) -> None:
    """Free the memory of an engine's state."""
    for leaf in jax.tree.leaves(engine.programs.state):
        leaf.delete()


def _accepted(runs: Sequence[Run]) -> list[float]:
    most = max(len(run.num_accepted_per_pos) for run in runs)
    steps = sum(run.num_request_steps for run in runs)
    padded = [[*run.num_accepted_per_pos, *[0] * most][:most] for run in runs]
    return [sum(accepted) / steps for accepted in zip(*padded, strict=True)]


def _per_step(before: Metrics, after: Metrics) -> dict[str, float]:
    """Return the host's times between two snapshots of the metrics, in milliseconds per step."""
    steps = max(1, after.num_steps - before.num_steps)
    return {
        name: (getattr(after, name) * after.num_steps - getattr(before, name) * before.num_steps)
        / steps
        for name in ("host_ms", "wait_ms")
    }
