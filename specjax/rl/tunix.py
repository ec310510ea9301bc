"""The engine as a rollout engine of Tunix (google-tunix).

Use it as `ClusterConfig(rollout_engine=partial(TunixRollout, model=folder, ...))`. This module can
be imported without Tunix; if Tunix is installed, `TunixRollout` is registered as a subclass of its
`BaseRollout`.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.device.placement import default_device
from specjax.rl.engine import RolloutEngine
from specjax.rl.nnx import Names, hf_named
from specjax.rl.rollouts import Rollout
from specjax.rl.tunix_names import names_of
from specjax.sampling_params import SamplingParams
from specjax.text.seeds import derived_seed, folded_seed

try:
    _tunix: Any = importlib.import_module("tunix.rl.rollout.base_rollout")
except ImportError:  # the adapter needs no class of Tunix
    _tunix = None


@dataclass
class RolloutOutput:
    """A replacement of Tunix's class of this name, used if Tunix is not installed."""

    text: list[str]
    logits: list[jax.Array] | None
    tokens: list[np.ndarray]
    left_padded_prompt_tokens: np.ndarray
    logprobs: list[np.ndarray] | None


class TunixRollout:
    """Generates the rollouts of a Tunix actor with a `RolloutEngine`, on one device.

    Tunix requests a group of samples by repeating a prompt: equal prompts in a call become samples
    of one request, which share its cache pages. Lengths and parameters may differ between calls
    without recompilation.

    Every call samples with a new seed, because Tunix's micro batches may split the samples of a
    prompt over calls. The seed is derived from the config's seed (or else the engine's) and the
    number of calls since construction, so the same sequence of calls gives the same samples.

    Args:
        rollout_actor: the model being trained, whose weights the engine starts with.
        tokenizer: a tokenizer with Tunix's methods encode, decode, bos_id, eos_id and pad_id.
        mesh: Tunix's mesh for rollouts; must be one device.
        rollout_config: Tunix's `RolloutConfig` for training, or one per mode. Defaults: its
            maximum prompt and output lengths set `max_model_len`, its `data_type` sets `dtype`.
        model: the actor's checkpoint, a folder or hub id, for the engine.
        speculative_config: as for `RolloutEngine`.
        names: rules that map the actor's parameters to names of the checkpoint, see `hf_named`;
            None for Tunix's Llama3, Qwen2 and Qwen3, and for a `PolicyModule`, which has the
            engine's paths.
        lora_scale: alpha / rank of the actor's LoRA adapters, which are merged at every update.
        options: as for `RolloutEngine`.

    Raises:
        ValueError: settings are not supported, or the actor's parameters do not fit.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any,
        rollout_config: Any,
        *,
        model: Any,
        speculative_config: Any = None,
        names: Names | None = None,
        lora_scale: float | None = None,
        **options: Any,
    ):
        by_mode = _by_mode(rollout_config)
        configs = list(by_mode.values())
        _check_tokenizer(tokenizer)
        _check_mesh(mesh)
        _check_on_device(rollout_actor)
        self._actor = rollout_actor
        self._tokenizer = tokenizer
        self._names = names_of(rollout_actor) if names is None else names
        self._lora_scale = lora_scale
        if self._is_masked(self._encode("")):
            raise ValueError(
                f"tokenizer begins every prompt with its padding, token {self.pad_id()}, which "
                "Tunix masks in training; give the tokenizer another token for padding"
            )
        for config in configs:
            _check_config(config)
            self._sampling_params(config, {})
        options = _sized(configs, options)
        self._max_model_len = options["max_model_len"]
        self._root_seed = options.get("seed", 0)
        self._num_calls = 0
        self._temperature = _training(by_mode).temperature
        self.engine = RolloutEngine(model, speculative_config=speculative_config, **options)
        try:
            if rollout_actor is not None:
                self.update_params(nnx.state(rollout_actor, nnx.Param))
        except BaseException:
            self.engine.close()
            raise

    def generate(self, prompts: Sequence[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Continue each prompt; return Tunix's `RolloutOutput`, in the order of the prompts.

        Prompts are padded to max_prompt_length and never truncated: as in Tunix's samplers, if one
        is longer, the width becomes the next power of two. Outputs include their end-of-sequence
        token.

        Args:
            kwargs: further fields of `SamplingParams`.

        Raises:
            ValueError: a setting is not supported, or a prompt does not fit.
        """
        _check_config(rollout_config)
        params = self._sampling_params(rollout_config, kwargs)
        encoded = [self._encode(prompt) for prompt in prompts]
        if any(map(self._is_masked, encoded)):
            raise ValueError(
                f"a prompt begins with the padding, token {self.pad_id()}, which Tunix masks "
                "in training; leave it out"
            )
        longest = max(map(len, encoded), default=0)
        if longest + rollout_config.max_tokens_to_generate > self._max_model_len:
            raise ValueError(
                f"max_tokens_to_generate={rollout_config.max_tokens_to_generate} after a prompt of "
                f"{longest} tokens exceeds max_model_len={self._max_model_len}; lower it, or give "
                "TunixRollout a higher max_model_len"
            )
        samples: dict[tuple[int, ...], list[int]] = {}  # indices in the call, by prompt
        for place, tokens in enumerate(encoded):
            samples.setdefault(tokens, []).append(place)
        seed = self._seed(rollout_config.seed)
        batch = self.engine.generate(
            [list(tokens) for tokens in samples],
            [
                replace(params, n=len(places), seed=derived_seed(seed, number))
                for number, places in enumerate(samples.values())
            ],
        )
        _check_complete(batch)
        order = [place for places in samples.values() for place in places]
        by_place = dict(zip(order, batch, strict=True))
        rollouts = [by_place[place] for place in range(len(encoded))]
        make = RolloutOutput if _tunix is None else _tunix.RolloutOutput
        return make(
            text=[self._tokenizer.decode(rollout.token_ids.tolist()) for rollout in rollouts],
            logits=None,
            tokens=[rollout.token_ids for rollout in rollouts],
            left_padded_prompt_tokens=_left_padded(
                encoded, rollout_config.max_prompt_length, self.pad_id()
            ),
            logprobs=[rollout.logprobs for rollout in rollouts]
            if rollout_config.return_logprobs
            else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Return log-probabilities f32[B, T] of completions under the engine's weights.

        They are recomputed, with the training temperature but no truncation, and 0 at padding.

        Args:
            prompt_tokens: i32[B, P], padded on the left.
            completion_tokens: i32[B, T], padded on the right.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        pad, logps = self.pad_id(), np.zeros(completions.shape, np.float32)
        pairs = {}
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            start, end = _first(prompt, pad), len(completion) - _first(completion[::-1], pad)
            if pad == self.eos_id() and end < len(completion):
                end += 1  # the end of sequence has the same id as padding
            if end:
                pairs[row] = prompt[start:].tolist(), completion[:end].tolist()
        # Tunix calls this in training, and computes the actor's and the reference's
        # log-probabilities with the training config, even after an evaluation. It does not divide
        # by a temperature of 0.
        params = SamplingParams(temperature=self._temperature or 1.0)
        scores = self.engine.score(list(pairs.values()), params)
        for row, score in zip(pairs, scores, strict=True):
            logps[row, : len(score.logprobs)] = score.logprobs
        return jnp.asarray(logps)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Update the engine with the actor's parameters, as a new weights version.

        Args:
            params: `nnx.state` of the actor, its parameters, or only its LoRA adapters.
            filter_types: the types by which the state was filtered.
        """
        if isinstance(params, nnx.State):
            params = nnx.filter_state(params, nnx.Param)
            if filter_types is not None and nnx.LoRAParam in filter_types:
                params = nnx.merge_state(nnx.state(self._actor, nnx.Param), params)
        # Tunix's guard finds unintended transfers; these are intended.
        with jax.transfer_guard("allow"):
            if self._names is not None:
                params = hf_named(params, self._names, lora_scale=self._lora_scale)
            self.engine.update_weights(params)

    def pad_id(self) -> int:
        """Return the tokenizer's padding id."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the tokenizer's end-of-sequence id."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Return None: with a model, Tunix would assume shared weights and skip updates."""

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _sampling_params(self, config: Any, more: Mapping[str, Any]) -> SamplingParams:
        given = {
            "temperature": config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": config.top_k or 0,
            "max_tokens": config.max_tokens_to_generate,
            "stop_token_ids": tuple(config.eos_tokens or [self.eos_id()]),
            "ignore_eos": True,  # Tunix's config has the ids that end an output
            "detokenize": False,
        }
        allowed = {field.name for field in fields(SamplingParams)} - given.keys() - {"n", "seed"}
        if unknown := sorted(more.keys() - allowed):
            raise ValueError(
                f"generate takes no {', '.join(unknown)}; of SamplingParams, {sorted(allowed)} may "
                "be given with the rollout_config"
            )
        return SamplingParams(**given, **more)

    def _encode(self, prompt: str) -> tuple[int, ...]:
        """Return token ids like Tunix's samplers: with one BOS, if the tokenizer has one."""
        tokens, bos = list(self._tokenizer.encode(prompt)), self._tokenizer.bos_id()
        if bos:
            start = next((i for i, token in enumerate(tokens) if token != bos), len(tokens))
            tokens = [bos, *tokens[start:]]
        return tuple(map(int, tokens))

    def _is_masked(self, tokens: tuple[int, ...]) -> bool:
        """Return whether a prompt begins with the padding id, which Tunix would mask."""
        return tokens[:1] == (self.pad_id(),)

    def _seed(self, seed: Any) -> int:
        """Return a seed for the next call, from a key, an integer, or, if None, the engine's
        seed."""
        if seed is None:
            words = [folded_seed(self._root_seed)]
        elif isinstance(seed, int | np.integer):
            words = [int(seed) % 2**64]
        else:
            is_typed = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
            words = np.asarray(jax.random.key_data(seed) if is_typed else seed).ravel().tolist()
        self._num_calls += 1
        return int(np.random.SeedSequence([*words, self._num_calls]).generate_state(1)[0])


def _by_mode(config: Any) -> Mapping[Any, Any]:
    return config if isinstance(config, Mapping) else {"train": config}


def _training(by_mode: Mapping[Any, Any]) -> Any:
    """Return the config of Tunix's Mode.TRAIN, or of the key "train"."""
    found = [config for mode, config in by_mode.items() if getattr(mode, "value", mode) == "train"]
    if not found:
        raise ValueError(
            f"rollout_config has the modes {', '.join(map(str, by_mode))}; add Mode.TRAIN, whose "
            "temperature get_per_token_logps uses"
        )
    return found[0]


def _sized(configs: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's options; Tunix's configs determine the default lengths and dtype."""
    if options.get("exact"):
        raise ValueError("exact=True engines score no tokens, which Tunix needs; leave it out")
    longest = max(config.max_prompt_length + config.max_tokens_to_generate for config in configs)
    sized: dict[str, Any] = {"max_model_len": longest, **options}
    if sized["max_model_len"] < longest:
        raise ValueError(
            f"max_model_len={sized['max_model_len']} is less than max_prompt_length + "
            f"max_tokens_to_generate={longest}; raise it, or leave it out"
        )
    types = {np.dtype(c.data_type).name for c in configs if c.data_type is not None}
    types |= {options["dtype"]} if types and "dtype" in options else set()
    if len(types) > 1:
        raise ValueError(
            f"data_type and dtype ask for {' and '.join(sorted(types))}; the engine keeps its "
            "weights in one type, so give only one"
        )
    if types:
        (sized["dtype"],) = types
    return sized


def _check_tokenizer(tokenizer: Any) -> None:
    methods = "encode", "decode", "bos_id", "eos_id", "pad_id"
    if lacking := [name for name in methods if not callable(getattr(tokenizer, name, None))]:
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__} has no methods {', '.join(lacking)}; wrap it in "
            "tunix's TokenizerAdapter"
        )


def _check_mesh(mesh: Any) -> None:
    if mesh is None:
        return
    devices = list(np.ravel(mesh.devices))
    if devices != [default_device()]:
        raise ValueError(
            f"mesh has the devices {devices}, but the engine runs only on {default_device()}; "
            "give Role.ROLLOUT a mesh of that device"
        )


def _check_on_device(actor: Any) -> None:
    arrays = [] if actor is None else jax.tree.leaves(nnx.state(actor, nnx.Param))
    kinds = {x.sharding.memory_kind for x in arrays if isinstance(x, jax.Array)}
    if "pinned_host" in kinds:
        raise ValueError(
            "rollout_actor is in host memory, as with offload_to_cpu=True; Tunix would also move "
            "the rollout's model, which this engine does not expose: set offload_to_cpu=False"
        )


def _check_config(config: Any) -> None:
    """Raise an error for unsupported settings of a `RolloutConfig`."""
    refused = {}
    for name in "tensor_parallel_size", "data_parallel_size", "expert_parallel_size":
        if getattr(config, name, 1) not in (-1, 1):
            refused[name] = "leave it at -1 or 1, one device"
    if getattr(config, "rollout_mapping_config", None) is not None:
        refused["rollout_mapping_config"] = "give TunixRollout names, see hf_named"
    for option in fields(config):
        if option.name.startswith(("rollout_vllm_", "rollout_sglang_jax_")):
            make = option.default_factory
            default = option.default if make is MISSING else make()
            if getattr(config, option.name) != default:
                refused[option.name] = "leave it out; TunixRollout takes the engine's own options"
    if refused:
        listed = "; ".join(f"{k}={getattr(config, k)!r}: {v}" for k, v in refused.items())
        raise ValueError(f"rollout_config has settings that this engine does not support: {listed}")


def _check_complete(batch: Sequence[Rollout]) -> None:
    """Raise an error if a rollout failed, which Tunix's output cannot represent."""
    for rollout in batch:
        if rollout.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"a sample of prompt {rollout.prompt_index} ended with "
                f"{rollout.finish_reason!r} after {len(rollout.token_ids)} tokens"
            ) from rollout.error


def _left_padded(prompts: Sequence[Sequence[int]], width: int, pad: int) -> np.ndarray:
    """Return prompts i32[B, P]; P is `width` or, if one is longer, the next power of two."""
    longest = max(map(len, prompts), default=0)
    if longest > width:
        width = 1 << (longest - 1).bit_length()
    padded = np.full((len(prompts), width), pad, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return padded


def _first(tokens: np.ndarray, pad: int) -> int:
    """Return the index of the first token that is not padding."""
    return next((i for i, token in enumerate(tokens.tolist()) if token != pad), len(tokens))


def _register() -> None:
    """Register `TunixRollout` as a subclass of Tunix's BaseRollout, which its cluster requires."""
    if _tunix is not None:
        _tunix.BaseRollout.register(TunixRollout)


_register()
