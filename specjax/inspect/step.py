"""Builds an engine's decode step, as a jitted function with arguments, without an engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.page_formats import PAGE_FORMATS
from specjax.config import EngineConfig, SpeculativeConfig
from specjax.device.drafters.drafter import Drafter, NoDrafter, Params, Variant
from specjax.device.drafters.narrow import narrow_drafter, with_head_copy
from specjax.device.inputs import DecodeInputs
from specjax.device.layout import Layout
from specjax.device.models.model import Model
from specjax.device.parallel import shapes_like, shapes_of
from specjax.device.placement import divided_shape, is_divided, local_shape
from specjax.device.verification import SeedExact, Verification, make_verification
from specjax.engine.programs import Decode, Observe
from specjax.engine.step_model import empty_state, step_model
from specjax.engine.tracing import Division, Program, Static, jitted
from specjax.engine.variants import FEW_LOGPROBS
from specjax.serving.source import open_drafter, open_model

LAYERS = r"^params\.target\.layers\[(\d+)\]"  # matches the names of a layer's weights
AFTER_LAYERS = r"^params\.target\.(norm|lm_head)"


@dataclass(frozen=True)
class Parts:
    """The models of a step. The leaves of `params` are shapes instead of arrays.

    With several devices, a divided array has the shape [devices, ...]: a part for each device.
    """

    target: Model
    drafter: Drafter
    verification: Verification
    params: Params
    num_layers: int  # layers of the whole model; `target` may have fewer

    @property
    def local(self) -> "Parts":
        """The models as each device runs them, with the shapes of one device's parameters."""
        params = jax.tree.map(local_shape, self.params)
        return replace(self, target=self.target.local, drafter=self.drafter.local, params=params)


def _round(batch: int, k: int) -> Program:
    return Decode(batch, k, Variant(num_logprobs=FEW_LOGPROBS))


def decode_step(
    models: Mapping[str, Any],
    batch: int,
    k: int,
    context: int,
    make_program: Callable[[int, int], Program] = _round,
    mesh: Mesh | None = None,
    **others: Any,
) -> tuple[Any, tuple, dict[str, Any]]:
    """Build a decode step for `batch` requests of `context` tokens, with k drafts per request.

    The engine's caches are just large enough for these requests. Return a jitted function, its
    arguments and its static arguments, as `compile_functions` expects them.

    Args:
        models: the arguments of `open_parts`, except the number of devices.
        make_program: a function that takes `batch` and k, and returns the program to build. The
            program takes parameters, state and packed inputs.
        mesh: the devices over which the model is divided; None for one device.
        others: further arguments of `fit_engine`.
    """
    num_devices = 1 if mesh is None else mesh.size
    parts = open_parts(**models, num_devices=num_devices)
    config = fit_engine(parts.target, batch, k, context, models["dtype"], **others)
    static = _static(parts, config)
    packed = jax.ShapeDtypeStruct(static.layout.packing(DecodeInputs).shape(batch), jnp.int32)
    state = jax.eval_shape(lambda: empty_state(config, static.model, k))
    if mesh is None:
        return jitted(make_program(batch, k), static), (parts.params, state, packed), {}
    state = jax.tree.map(lambda x: divided_shape((num_devices, *x.shape), x.dtype), state)
    args = parts.params, state, packed
    division = Division(mesh, tuple(map(is_divided, jax.tree.leaves(args))))
    return jitted(make_program(batch, k), static, division=division), args, {}


def plain_step(*described: Any, **further: Any) -> tuple[Any, tuple, dict[str, Any]]:
    """Build the decode step without the work that `Variant.is_plain` leaves out.

    The arguments and results are as in `decode_step`.
    """
    plain = Variant(is_plain=True)
    return decode_step(*described, **further, make_program=lambda b, k: Decode(b, k, plain))


def observe_step(*described: Any, **further: Any) -> tuple[Any, tuple, dict[str, Any]]:
    """Build the program in which the drafter reads the hidden states of steps without drafts.

    The arguments and results are as in `decode_step`.
    """
    return decode_step(*described, **further, make_program=lambda batch, _: Observe(batch))


def max_deferred(parts: Parts, config: EngineConfig, batch: int, k: int) -> int:
    """Return how many steps without drafts can share one run of `observe_step`'s program.

    Return 0 if every step updates the drafter's cache itself, as steps with drafts (k > 0) do.
    """
    return 0 if k else _static(parts, config).model.max_deferred(batch)


def _static(parts: Parts, config: EngineConfig) -> Static:
    local = parts.local
    model = step_model(config, local.target, local.drafter, parts.verification, "gpu")
    return Static(model, Layout.of(config, parts.target.vocab_size, model.windows))


def open_parts(
    model: str,
    speculation: Mapping[str, Any] | None,
    num_layers: int | None,
    dtype: str,
    num_devices: int = 1,
    divides_experts: bool = False,
    quantization: str | None = None,
) -> Parts:
    """Build target and drafter from their configs, without weights.

    If `model` is a checkpoint with weights, the headers of its files tell which matrices are
    quantised. Otherwise, the config does.

    Args:
        model: a checkpoint or a config, as for `specjax info`.
        speculation: the fields of a `SpeculativeConfig`; None for plain decoding.
        num_layers: the number of the target's first layers to use; None for all layers.
        dtype: the dtype of weights and states.
        num_devices: the number of devices over which the weights are divided.
        divides_experts: whether each of several devices has whole experts.
        quantization: the kind of numbers to which unquantised weights are rounded, see `LLM`.

    Raises:
        ValueError: the files do not describe a model, the model has fewer than `num_layers` layers,
            or experts are to be divided but the model has none.
    """
    devices = {"num_devices": num_devices, "divides_experts": divides_experts}
    source = open_model(model, takes_configs=True, quantization=quantization, **devices)
    source = replace(source, dtype=dtype)  # also of the rows of quantised embeddings
    target = source.target
    drafter, drafter_params, verification = NoDrafter(), None, SeedExact()
    config = None if speculation is None else SpeculativeConfig.of(speculation)
    if config is not None:
        drafter, drafter_params = open_drafter(config, source, dtype)
        verification = make_verification(config)
    fewer = target if num_layers is None else with_layers(target, num_layers)
    drafter = reading_at_most(drafter, fewer.num_layers)
    if drafter.weights is not None:
        drafter_params = shapes_like(drafter.weights, drafter_params)
    params = Params(shapes_of(replace(source, target=fewer).specs, dtype), drafter_params)
    if config is not None:
        params = params._replace(drafter=narrow_drafter(drafter_params, config))
        params = with_head_copy(params, drafter, config)
    return Parts(fewer, drafter, verification, params, target.num_layers)


def with_layers(target: Model, num_layers: int) -> Model:
    """Return the target with only its first `num_layers` layers."""
    if not 1 <= num_layers <= target.num_layers:
        raise ValueError(
            f"layers={num_layers} must be in 1..{target.num_layers}, the layers of the model"
        )
    return target.with_layers(num_layers)


def reading_at_most(drafter: Any, num_layers: int) -> Drafter:
    """Return the drafter for a target that has only its first `num_layers` layers.

    Some drafters read the inputs of some of the target's layers. If such a layer is missing, the
    drafter reads the output of the last layer instead.
    """
    layers = tuple(min(i, num_layers) for i in drafter.aux_layers)
    if layers == drafter.aux_layers:
        return drafter
    return replace(drafter, head=replace(drafter.head, aux_layers=layers))


def fit_engine(
    target: Model,
    batch: int,
    k: int,
    context: int,
    dtype: str,
    page_size: int = 16,
    kv_cache_dtype: str = "auto",
) -> EngineConfig:
    """Return the config of an engine with just enough pages for a step of `batch` requests.

    Each request has `context` tokens, and the step has `k` drafts per request. The drafter's pages
    have the same dtype as the target's pages.

    Raises:
        ValueError: sizes are not positive, or the model's maximum is below `context` + 2 (`k` + 1).
    """
    max_model_len = context + 2 * (k + 1)
    if max_model_len > target.max_position:
        raise ValueError(
            f"context={context}: with one more round it is {max_model_len} tokens, but the model "
            f"was made for {target.max_position}; lower it"
        )
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=batch,
        max_num_batched_tokens=max(512, batch * (k + 1)),
        page_size=page_size,
        num_pages=batch * -(-max_model_len // page_size),
        dtype=dtype,
        page_format=PAGE_FORMATS.get(kv_cache_dtype),
        draft_page_format=PAGE_FORMATS.get(kv_cache_dtype),
    )


def state_bytes(parts: Parts, config: EngineConfig, k: int) -> int:
    """Return the size in bytes of a step's state on each device."""
    state = jax.eval_shape(lambda: empty_state(config, _static(parts, config).model, k))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
