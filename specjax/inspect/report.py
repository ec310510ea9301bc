"""Reports on a decode step compiled for a named GPU: its CUDA graph, kernels, bytes and memory.

    compile_step("benchmarks/configs/Llama-3.1-8B", batch=64, k=0).verify.ratio

The counts are taken from the optimized program (see hlo.py). They are for a batch that decodes
greedily, for which every conditional takes branch 0. Kernels in a loop of unknown length count
once, and such loops are listed.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pallas_kernels.page_formats import PAGE_FORMATS
from specjax.config import (
    COLLECTIVES,
    KV_CACHE_DTYPES,
    SpeculativeConfig,
    check_choice,
    check_count,
    check_positive,
)
from specjax.device.placement import AXIS
from specjax.engine.xla_options import GPU_OPTIONS, collective_options
from specjax.inspect import hlo_text, step
from specjax.inspect.compile import AFTER_LAYERS, compile_functions
from specjax.inspect.gpus import GPU
from specjax.inspect.hlo import Launch
from specjax.inspect.kept import Kept
from specjax.inspect.minimum import Minimum, minimum_bytes
from specjax.inspect.resources import Resources
from specjax.methods import METHODS, OWN_SHAPE

GEMMS = {"triton": {}, "cublas": {"xla_gpu_enable_triton_gemm": False}}  # XLA's options
DTYPE = "bfloat16"
PARTS = "draft", "verify", "settle", "observe", "other"


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """A decode step to compile.

    Attributes:
        target: the name of a GPU in `gpus`.
        model: a checkpoint or a config, as for `specjax info`; weights are not read.
        batch: the number of requests.
        k: the number of drafts; 0 for a step without drafting.
        context: the number of tokens per request. The cache is just large enough for them.
        gemm: the matmul kernels: "triton" (made by XLA, without autotuning) or "cublas".
        method: the drafting method; None for plain decoding, which needs k = 0.
        drafter: the drafter's checkpoint. If None, the method "mtp" uses the model's own module,
            and "eagle" uses a head of the model's own shape.
        num_layers: the number of the target's first layers to compile; None for all layers.
        page_size: the number of tokens per page.
        kv_cache_dtype: dtype of the target's and the drafter's pages, see `LLM`.
        tensor_parallel_size: the number of GPUs over which the model is divided.
        enable_expert_parallel: whether each GPU has whole experts, instead of a part of each.
        collectives: how these GPUs exchange sums (see `EngineConfig`).
        quantization: the kind of numbers to which unquantised weights are rounded, see `LLM`.
        narrow: pairs (field, value): the drafter's `head_dtype` and `quantization`, if set.
    """

    model: str | Path
    batch: int
    k: int
    context: int = 2048
    gemm: str = "triton"
    method: str | None = None
    drafter: str | None = None
    num_layers: int | None = None
    page_size: int = 16
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    collectives: str = "auto"
    quantization: str | None = None
    narrow: tuple[tuple[str, Any], ...] = ()
    target: str = "h200"

    def __post_init__(self):
        try:
            GPU.named(self.target)
        except ValueError as error:
            raise ValueError(f"compile={error}") from None
        check_choice("gemm", self.gemm, tuple(GEMMS))
        check_choice("collectives", self.collectives, COLLECTIVES)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_positive(
            batch_size=self.batch,
            context=self.context,
            page_size=self.page_size,
            tensor_parallel_size=self.tensor_parallel_size,
        )
        check_count(k=self.k)
        if self.num_layers is not None:
            check_positive(layers=self.num_layers)
        if self.method is None and self.k > 0:
            raise ValueError(
                f"k={self.k} drafts need a drafter; set a method (eagle or mtp), or k=0"
            )

    @cached_property
    def speculation(self) -> dict[str, Any] | None:
        """The fields of the `SpeculativeConfig`; None without a method."""
        if self.method is None:
            return None
        drafter = self.drafter
        if drafter is None and self.method in METHODS and METHODS[self.method].needs_shape:
            drafter = OWN_SHAPE
        fields = {"method": self.method, "model": drafter, "num_speculative_tokens": max(self.k, 1)}
        SpeculativeConfig.of(fields := fields | dict(self.narrow))
        return fields

    @property
    def models(self) -> dict[str, Any]:
        """The arguments of `step.open_parts`, except the number of devices."""
        return {
            "model": str(self.model),
            "speculation": self.speculation,
            "num_layers": self.num_layers,
            "dtype": DTYPE,
            "divides_experts": self.enable_expert_parallel,
            "quantization": self.quantization,
        }

    @property
    def is_plain(self) -> bool:
        """Whether the step is compiled without optional work, see `Variant.is_plain`."""
        return self.tensor_parallel_size > 1 and self.collectives != "graph"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `step.decode_step`."""
        names = "batch", "k", "context", "page_size", "kv_cache_dtype"
        return {"models": self.models, **{name: getattr(self, name) for name in names}}

    @property
    def options(self) -> dict[str, Any]:
        """XLA's options, as an engine sets them."""
        own = collective_options(self.collectives) if self.tensor_parallel_size > 1 else {}
        return {**GPU_OPTIONS, **GEMMS[self.gemm], **own}


@dataclass(frozen=True)
class Layers:
    """The kernel counts of the layers of one kind, and the kernels of a typical layer."""

    num_layers: int
    minimum: int  # minimum number of kernels per layer
    maximum: int  # maximum number of kernels per layer
    kernels: tuple[Launch, ...]  # the kernels of a layer with the most common number of kernels

    @property
    def collectives(self) -> tuple[Launch, ...]:
        """The typical layer's kernels with which devices exchange values."""
        return tuple(one for one in self.kernels if one.kind in hlo_text.COLLECTIVES)


@dataclass(frozen=True)
class Moved:
    """The number of bytes that kernels move, and the minimum number."""

    moved: int  # bytes that kernels read and write
    minimum: int  # minimum bytes without activations; see the module `minimum`
    with_activations: int  # minimum bytes with activations

    @property
    def ratio(self) -> float:
        """The moved bytes divided by the minimum without activations."""
        return self.moved / self.minimum

    @property
    def ratio_with_activations(self) -> float:
        """The moved bytes divided by the minimum bytes, including activations.

        Activations are the embedded rows, and the new keys and values that attention reads back.
        """
        return self.moved / self.with_activations


@dataclass(frozen=True)
class ObservedLater:
    """The program in which the drafter reads the hidden states that steps without drafts kept."""

    num_steps: int  # maximum number of steps that are observed
    num_launches: int
    num_bytes: int


@dataclass(frozen=True)
class StepReport:
    """The report on a compiled step. Bytes and kernels are counted per step and per device."""

    request: StepRequest
    num_layers: int  # layers of the whole model, even if fewer are compiled
    is_one_command_buffer: bool
    top_level: Mapping[str, int]  # number of top-level thunks, by kind
    unknown_loops: tuple[str, ...]
    uncaptured_conditionals: tuple[str, ...]
    state_bytes: int
    memory: Mapping[str, int]  # bytes: argument, output, alias, temp, peak
    seconds: Mapping[str, float]  # durations: trace, compile
    large_copies: tuple[Launch, ...]
    launches: tuple[Launch, ...] = field(repr=False)
    layers: Mapping[str, Layers]
    minimum: Minimum
    resources: tuple[Resources, ...] | None  # of Pallas kernels and of kernels that spill registers
    observed_later: ObservedLater | None  # None if the drafter observes within the step

    @property
    def is_state_in_place(self) -> bool:
        """Whether the whole donated state is updated in place."""
        return self.memory["alias"] >= self.state_bytes

    @cached_property
    def num_launches(self) -> dict[str, int]:
        """The number of launches in the step and in each part in `PARTS`, for a greedy batch."""
        by_part: Counter[str] = Counter()
        for one in self.taken:
            by_part[part_of(one)] += one.times
        return {"step": by_part.total(), **{part: by_part[part] for part in PARTS}}

    @cached_property
    def taken(self) -> list[Launch]:
        """The kernels that run for a greedy batch."""
        return [one for one in self.launches if one.is_taken]

    @cached_property
    def collectives(self) -> list[Launch]:
        """The kernels with which devices exchange values, for a greedy batch.

        Each device contributes the bytes that such a kernel reads.
        """
        return [one for one in self.taken if one.kind in hlo_text.COLLECTIVES]

    @cached_property
    def asked(self) -> list[Launch]:
        """The kernels that run for a batch with all optional work (branch 1 of every conditional).

        Optional work is temperature, penalties, truncation, bias, bad words and log-probabilities.
        """
        return [one for one in self.launches if one.is_taken_by(1)]

    @cached_property
    def num_bytes(self) -> dict[str, int]:
        """The bytes that a greedy "step", and each part in `PARTS`, read and write on a device."""
        by_part: Counter[str] = Counter()
        for one in self.taken:
            by_part[part_of(one)] += one.num_bytes
        return {"step": by_part.total(), **{part: by_part[part] for part in PARTS}}

    @property
    def verify(self) -> Moved:
        """The bytes that the target's forward pass moves, up to the logits."""
        minimum = self.minimum.verify
        return Moved(self.num_bytes["verify"], minimum, minimum + self.minimum.activations)

    @property
    def step(self) -> Moved:
        """The bytes that the whole step moves."""
        minimum = self.minimum.step
        return Moved(self.num_bytes["step"], minimum, minimum + self.minimum.activations)


def compile_step(
    model: str | Path,
    batch: int,
    k: int,
    *,
    resources: bool = False,
    timeout: float = 1800,
    **settings: Any,
) -> StepReport:
    """Compile one step and report on it; `settings` are further fields of `StepRequest`."""
    request = StepRequest(model=model, batch=batch, k=k, **settings)
    return compile_steps([request], resources=resources, timeout=timeout)[0]


def compile_steps(
    requests: Sequence[StepRequest],
    *,
    resources: bool = False,
    timeout: float = 1800,
    kept: Kept | None = None,
) -> list[StepReport]:
    """Compile several steps in one process; return a report for each step.

    See `compile_functions` for the keyword arguments.

    Raises:
        ValueError: a request does not describe a step, or the tools are missing.
        RuntimeError: compilation failed.
    """
    parts = [_open(request) for request in requests]  # raises before any compilation
    asked = [
        {
            "function": "plain_step" if request.is_plain else "decode_step",
            "gpu": request.target,
            "arguments": request.arguments,
            "options": request.options,
            "traffic": _traffic(request, part),
        }
        | ({"mesh": (AXIS, request.tensor_parallel_size)} if part.target.num_devices > 1 else {})
        for request, part in zip(requests, parts, strict=True)
    ]
    deferred = {
        i: count
        for i, (request, part) in enumerate(zip(requests, parts, strict=True))
        if (count := _max_deferred(request, part))
    }
    asked += [asked[i] | {"function": "observe_step"} for i in deferred]
    made = compile_functions(step.__file__, asked, resources=resources, timeout=timeout, kept=kept)
    later = {
        i: _observed_later(count, one)
        for (i, count), one in zip(deferred.items(), made[len(requests) :], strict=True)
    }
    steps = zip(requests, parts, made[: len(requests)], strict=True)
    return [_report(*each, later.get(i)) for i, each in enumerate(steps)]


def part_of(launch: Launch) -> str:
    """Return the part of a step (one of `PARTS`) to which a kernel belongs.

    The kernel's named scopes and its layer determine the part.
    """
    scopes = launch.scope.split("/")
    found = next((scope for scope in scopes if scope in PARTS), None)
    if found == "settle" and "observe" in scopes:
        return "observe"
    return found or ("verify" if launch.layer is not None else "other")


def in_layer(launch: Launch) -> bool:
    """Return whether a kernel belongs to one of the target's layers."""
    return launch.layer is not None and launch.layer < AFTER_LAYERS


def _open(request: StepRequest) -> step.Parts:
    parts = step.open_parts(**request.models, num_devices=request.tensor_parallel_size)
    _fit(request, parts)
    return parts


def _fit(request: StepRequest, parts: step.Parts) -> Any:
    sizes = request.batch, request.k, request.context, DTYPE
    return step.fit_engine(parts.target, *sizes, request.page_size, request.kv_cache_dtype)


def _max_deferred(request: StepRequest, parts: step.Parts) -> int:
    return step.max_deferred(parts, _fit(request, parts), request.batch, request.k)


def _observed_later(num_steps: int, made: Mapping[str, Any]) -> ObservedLater:
    taken = [one for one in map(_launch, made["launches"]) if one.is_taken]
    num_launches = sum(one.times for one in taken)
    return ObservedLater(num_steps, num_launches, sum(one.num_bytes for one in taken))


def _traffic(request: StepRequest, parts: step.Parts) -> dict[str, Any]:
    """Return the argument `traffic` of `compile.report`."""
    experts, rows = getattr(parts.target, "experts", None), request.k + 1
    is_chain = parts.drafter.num_passes(request.k) > 1 and not parts.drafter.is_recurrent
    return {
        "batch": request.batch,
        "context": request.context,
        "rows": rows,
        "rows_within": {"/draft/": 1} if is_chain else {},
        "num_chosen": None if experts is None else experts.num_chosen,
        "layers": step.LAYERS,
        "after": step.AFTER_LAYERS,
        "inside": "/verify/",
    }


def _report(
    request: StepRequest,
    parts: step.Parts,
    made: Mapping[str, Any],
    observed_later: ObservedLater | None,
) -> StepReport:
    launches, local = tuple(_launch(one) for one in made["launches"]), parts.local
    resources = None
    if made["resources"] is not None:
        pallas = {one.pallas for one in launches if one.pallas}
        found = map(Resources.of, made["resources"])
        resources = tuple(
            one for one in found if one.spills or one.is_mosaic or {one.name, one.kernel} & pallas
        )
    return StepReport(
        request=request,
        num_layers=parts.num_layers,
        is_one_command_buffer=made["is_one_command_buffer"],
        top_level=dict(Counter(made["top_level"])),
        unknown_loops=tuple(made["unknown_loops"]),
        uncaptured_conditionals=tuple(made["uncaptured_conditionals"]),
        state_bytes=step.state_bytes(parts, _fit(request, parts), request.k),
        memory=made["memory"],
        seconds=made["seconds"],
        large_copies=tuple(_launch(one) for one in made["large_copies"]),
        launches=launches,
        layers=_by_kind(launches, parts),
        minimum=minimum_bytes(
            local.target,
            local.drafter,
            local.params,
            batch=request.batch,
            k=request.k,
            context=request.context,
            dtype=DTYPE,
            page_format=PAGE_FORMATS.get(request.kv_cache_dtype),
            is_deferred=observed_later is not None,
        ),
        resources=resources,
        observed_later=observed_later,
    )


def _by_kind(launches: Sequence[Launch], parts: step.Parts) -> dict[str, Layers]:
    target = parts.target
    kinds = [target.cache_kinds[kind].name for kind in target.layer_kinds]
    by_layer: dict[int, list[Launch]] = {i: [] for i in range(target.num_layers)}
    for one in launches:
        if one.is_taken and in_layer(one):
            by_layer[one.layer or 0].append(one)
    found = {}
    for kind in dict.fromkeys(kinds):
        mine = [by_layer[i] for i, one in enumerate(kinds) if one == kind]
        counts = [sum(one.times for one in layer) for layer in mine]
        usual = Counter(counts).most_common(1)[0][0]
        typical = tuple(mine[counts.index(usual)])
        found[kind] = Layers(len(mine), min(counts), max(counts), typical)
    return found


def _launch(fields: Mapping[str, Any]) -> Launch:
    branches = tuple((name, number) for name, number in fields["branches"])
    return Launch(**{**fields, "branches": branches, "parameters": tuple(fields["parameters"])})


def describe(launch: Launch) -> str:
    """Return a line with a kernel's kind, name, JAX operation and the weights that it reads."""
    source = re.sub(r"^.*?/(?:jit\([^)]*\)/)*", "", launch.source.removeprefix("jit(decode)/"))
    weights = [name.partition(".")[2] for name in launch.parameters if name.startswith("params.")]
    names = f"{launch.pallas or launch.kind:16} {launch.name:32} {source or '-'}"
    return f"{names}  {' '.join(weights)}".rstrip()
