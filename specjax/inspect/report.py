"""What XLA makes of a decode step on an H200: one CUDA graph or not, kernels, bytes, memory.

    compile_step("benchmarks/configs/Llama-3.1-8B", batch=64, k=0).bytes.verify.ratio

Counted from the optimized program, as hlo.py says, for a batch that decodes greedily (of every
conditional, branch 0). What is in a loop of unknown length counts once, and such loops are listed.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specjax.config import OWN_SHAPE, SpeculativeConfig, check_count, check_positive
from specjax.engine.precompile import GPU_OPTIONS
from specjax.inspect import step
from specjax.inspect.compile import AFTER_LAYERS, compile_functions
from specjax.inspect.hlo import Launch
from specjax.inspect.minimum import Minimum, minimum_bytes
from specjax.inspect.resources import Resources

TARGETS = ("h200",)
GEMMS = {"triton": {}, "cublas": {"xla_gpu_enable_triton_gemm": False}}  # XLA's options
DTYPE = "bfloat16"
PARTS = "draft", "verify", "settle", "observe", "other"


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """A decode step to compile.

    Attributes:
        model: a checkpoint or a config, as `specjax info` takes it; weights are not read.
        batch: requests.
        k: drafts; 0 for a step without.
        context: tokens of each request, which its pages have room for and little more.
        gemm: "triton", XLA's choice without autotuning, or "cublas".
        method: of drafting; None for plain decoding, which k > 0 is not.
        drafter: its checkpoint; without one, "mtp" is the model's own module and "eagle" a head of
            the model's own shape.
        num_layers: compile the target's first layers alone; None for all.
        page_size: tokens per page.
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
    target: str = "h200"

    def __post_init__(self):
        if self.target not in TARGETS:
            raise ValueError(
                f"compile={self.target!r} is not a known target; choose one of {', '.join(TARGETS)}"
            )
        if self.gemm not in GEMMS:
            raise ValueError(
                f"gemm={self.gemm!r} is not supported; choose one of {', '.join(GEMMS)}"
            )
        check_positive(batch_size=self.batch, context=self.context, page_size=self.page_size)
        check_count(k=self.k)
        if self.num_layers is not None:
            check_positive(layers=self.num_layers)
        if self.method is None and self.k > 0:
            raise ValueError(
                f"k={self.k} drafts need a drafter; give a method (eagle or mtp), or k=0"
            )

    @cached_property
    def speculation(self) -> dict[str, Any] | None:
        """Fields of a SpeculativeConfig."""
        if self.method is None:
            return None
        drafter = self.drafter
        if drafter is None and self.method == "eagle":
            drafter = OWN_SHAPE
        maximum = max(self.k, 1)
        fields = {"method": self.method, "model": drafter, "num_speculative_tokens": maximum}
        SpeculativeConfig.of(fields)
        return fields

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `step.decode_step`."""
        return {
            "model": str(self.model),
            "batch": self.batch,
            "k": self.k,
            "context": self.context,
            "speculation": self.speculation,
            "num_layers": self.num_layers,
            "page_size": self.page_size,
            "dtype": DTYPE,
        }


@dataclass(frozen=True)
class Layers:
    """What the layers of a kind launch."""

    num_layers: int
    minimum: int  # kernels of a layer
    maximum: int
    kernels: tuple[Launch, ...]  # of one that has as many as most of them have


@dataclass(frozen=True)
class Moved:
    """Bytes that kernels read and write, and those that they cannot do without."""

    moved: int
    minimum: int  # without activations, see `minimum`
    with_activations: int

    @property
    def ratio(self) -> float:
        """Against weights, keys and values, and states alone."""
        return self.moved / self.minimum

    @property
    def ratio_with_activations(self) -> float:
        """Against those, embedded rows, and new keys and values once more."""
        return self.moved / self.with_activations


@dataclass(frozen=True)
class StepReport:
    """What XLA made of a step. Bytes and kernels are of one step."""

    request: StepRequest
    num_layers: int  # of the model, whether compiled or not
    is_one_command_buffer: bool
    top_level: Mapping[str, int]  # thunks outside which there is none, by kind
    unknown_loops: tuple[str, ...]
    uncaptured_conditionals: tuple[str, ...]
    state_bytes: int
    memory: Mapping[str, int]  # bytes: argument, output, alias, temp, peak
    seconds: Mapping[str, float]  # trace, compile
    large_copies: tuple[Launch, ...]
    launches: tuple[Launch, ...] = field(repr=False)
    layers: Mapping[str, Layers]
    minimum: Minimum
    resources: tuple[Resources, ...] | None  # of Pallas kernels, and of others that spill

    @property
    def is_state_in_place(self) -> bool:
        """Whether all of the donated state is where it was."""
        return self.memory["alias"] >= self.state_bytes

    @cached_property
    def num_launches(self) -> dict[str, int]:
        """Kernels of the step, and of its parts: "settle" is without what the drafter observes."""
        by_part: Counter[str] = Counter()
        for one in self.taken:
            by_part[part_of(one)] += one.times
        return {"step": by_part.total(), **{part: by_part[part] for part in PARTS}}

    @cached_property
    def taken(self) -> list[Launch]:
        """The kernels of a greedy batch."""
        return [one for one in self.launches if one.is_taken]

    @cached_property
    def num_bytes(self) -> dict[str, int]:
        """Bytes moved by the step and by its parts."""
        by_part: Counter[str] = Counter()
        for one in self.taken:
            by_part[part_of(one)] += one.num_bytes
        return {"step": by_part.total(), **{part: by_part[part] for part in PARTS}}

    @property
    def verify(self) -> Moved:
        """The target's forward pass, up to the logits."""
        minimum = self.minimum.verify
        return Moved(self.num_bytes["verify"], minimum, minimum + self.minimum.activations)

    @property
    def step(self) -> Moved:
        """All of the step."""
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
    """The report of one step; settings are a StepRequest's."""
    request = StepRequest(model=model, batch=batch, k=k, **settings)
    return compile_steps([request], resources=resources, timeout=timeout)[0]


def compile_steps(
    requests: Sequence[StepRequest], *, resources: bool = False, timeout: float = 1800
) -> list[StepReport]:
    """The reports of several, from one process.

    Raises:
        ValueError: a request does not describe a step, or the tools are missing.
        RuntimeError: compilation failed.
    """
    parts = [_open(request) for request in requests]  # before any work
    asked = [
        {
            "function": "decode_step",
            "arguments": request.arguments,
            "options": GPU_OPTIONS | GEMMS[request.gemm],
            "traffic": {
                "batch": request.batch,
                "context": request.context,
                "rows": request.k + 1,
                "layers": step.LAYERS,
                "after": step.AFTER_LAYERS,
                "inside": "/verify/",
            },
        }
        for request in requests
    ]
    made = compile_functions(step.__file__, asked, resources=resources, timeout=timeout)
    return [_report(*each) for each in zip(requests, parts, made, strict=True)]


def kernel_resources(
    file: str | Path, requests: Sequence[Mapping[str, Any]], *, timeout: float = 600
) -> list[list[Resources]]:
    """What each kernel takes of the functions that `compile_functions` would compile."""
    made = compile_functions(file, requests, resources=True, timeout=timeout)
    return [[_resources(one) for one in report["resources"]] for report in made]


def part_of(launch: Launch) -> str:
    """The part of a step that a kernel belongs to, by the named scopes that it was traced in."""
    scopes = launch.scope.split("/")
    found = next((scope for scope in scopes if scope in PARTS), None)
    if found == "settle" and "observe" in scopes:
        return "observe"
    return found or ("verify" if launch.layer is not None else "other")


def _open(request: StepRequest) -> step.Parts:
    parts = step.open_parts(str(request.model), request.speculation, request.num_layers, DTYPE)
    _fit(request, parts)
    return parts


def _fit(request: StepRequest, parts: step.Parts) -> Any:
    sizes = request.batch, request.k, request.context, request.page_size
    return step.fit_engine(parts.target, *sizes, DTYPE)


def _report(request: StepRequest, parts: step.Parts, made: Mapping[str, Any]) -> StepReport:
    launches = tuple(_launch(one) for one in made["launches"])
    resources = None
    if made["resources"] is not None:
        pallas = {one.pallas for one in launches if one.pallas}
        found = map(_resources, made["resources"])
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
            parts.target,
            parts.drafter,
            parts.params.target,
            parts.params.drafter,
            batch=request.batch,
            k=request.k,
            context=request.context,
            dtype=DTYPE,
        ),
        resources=resources,
    )


def _by_kind(launches: Sequence[Launch], parts: step.Parts) -> dict[str, Layers]:
    target = parts.target
    kinds = [target.cache_kinds[kind].name for kind in target.layer_kinds]
    by_layer: dict[int, list[Launch]] = {i: [] for i in range(target.num_layers)}
    for one in launches:
        if one.is_taken and one.layer is not None and one.layer < AFTER_LAYERS:
            by_layer[one.layer].append(one)
    found = {}
    for kind in dict.fromkeys(kinds):
        mine = [by_layer[i] for i, one in enumerate(kinds) if one == kind]
        counts = [sum(one.times for one in layer) for layer in mine]
        usual = Counter(counts).most_common(1)[0][0]
        typical = mine[counts.index(usual)]
        found[kind] = Layers(len(mine), min(counts), max(counts), tuple(typical))
    return found


def _launch(fields: Mapping[str, Any]) -> Launch:
    branches = tuple((name, number) for name, number in fields["branches"])
    return Launch(**{**fields, "branches": branches, "parameters": tuple(fields["parameters"])})


def _resources(fields: Mapping[str, Any]) -> Resources:
    shape = {name: fields[name] and tuple(fields[name]) for name in ("grid", "threads")}
    return Resources(**{**fields, **shape})


def describe(launch: Launch) -> str:
    """A kernel in a line: what and which it is, the operation it comes from, weights it reads."""
    source = re.sub(r"^.*?/(?:jit\([^)]*\)/)*", "", launch.source.removeprefix("jit(run_decode)/"))
    weights = [name.partition(".")[2] for name in launch.parameters if name.startswith("params.")]
    names = f"{launch.pallas or launch.kind:16} {launch.name:32} {source or '-'}"
    return f"{names}  {' '.join(weights)}".rstrip()
