"""Runs `specjax info --compile`: compiles a decode step, and prints a report about it."""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from specjax.bench.environment import describe_versions
from specjax.commands.info import read_model
from specjax.commands.info_text import as_size
from specjax.commands.info_text import as_text as value_text
from specjax.commands.speculation import read_speculation
from specjax.inspect.hlo import Launch
from specjax.inspect.report import PARTS, StepReport, StepRequest, compile_steps, describe, in_layer
from specjax.methods import METHODS, OWN_SHAPE
from specjax.serving.source import open_model

_NARROW = "head_dtype", "quantization"  # fields of a speculative config
_SPECULATION = "method", "model", "num_speculative_tokens", *_NARROW
_SIZES = {"max_num_seqs": "--batch-size", "max_model_len": "--context"}


def run(args: argparse.Namespace) -> int:
    """Run `specjax info --compile`."""
    request = read_request(args)
    requests = [request, *([] if request.quantization is None else [_plain(request)])]
    report, *others = compile_steps(requests, resources=args.resources)
    if args.json:
        plain = {"plain": as_json(others[0])} if others else {}
        # Do not report this machine's devices, because nothing runs on them.
        print(json.dumps({**as_json(report), **plain, "versions": describe_versions()}, indent=2))
    else:
        lines = [*as_lines(report), *(line for one in others for line in _beside(report, one))]
        print("\n".join(lines))
    return 0


def _plain(request: StepRequest) -> StepRequest:
    """Return `request` with unquantised weights, to compile the same step for comparison."""
    return replace(request, quantization=None)


def _beside(report: StepReport, plain: StepReport) -> Iterator[str]:
    """Yield lines that compare quantised weights (`report`) with unquantised weights (`plain`)."""
    yield f"{report.request.quantization}, and plain weights"

    def line(name: str, show: Callable[[StepReport], str]) -> str:
        return _line(name, f"{show(report):>12}  {show(plain):>12}")

    yield line("parameters", lambda one: as_size(one.minimum.weights))
    yield line("kernels of the step", lambda one: str(one.num_launches["step"]))
    for kind in report.layers:
        most = f"kernels of a {kind} layer"
        yield line(most, lambda one, kind=kind: str(one.layers[kind].maximum))
    yield line("bytes moved", lambda one: as_size(one.step.moved))
    yield line("ratio", lambda one: f"{one.step.ratio:.4f}")
    yield line("one command buffer", lambda one: "yes" if one.is_one_command_buffer else "NO")


def read_request(args: argparse.Namespace) -> StepRequest:
    """Return the decode step to compile, as the arguments describe it.

    Raises:
        ValueError: the arguments are invalid or contradict each other.
    """
    for name, instead in _SIZES.items():
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} does not go with --compile; give {instead} instead")
    if args.devices is not None:
        raise ValueError(
            "--devices does not go with --compile; give --tensor-parallel-size instead"
        )
    if args.adaptive:
        raise ValueError("--adaptive does not go with --compile; give --k instead")
    model = read_model(args)
    given = argparse.Namespace(**{**vars(args), "k": None})
    speculation = read_speculation(given, model, takes_shapes=True) or {}
    method, drafter = speculation.get("method"), speculation.get("model")
    if method is not None and not METHODS[method].has_weights:
        known = ", ".join(name for name, needs in METHODS.items() if needs.has_weights)
        raise ValueError(f"method {method!r} drafts without a model; give one of {known}")
    if unused := [name for name in speculation if name not in _SPECULATION]:
        raise ValueError(
            f"--speculative-config: {unused[0]!r} does not go with --compile; leave it out"
        )
    usual = speculation.get("num_speculative_tokens", 3) if speculation else 0
    k = args.k if args.k is not None else usual
    return StepRequest(
        target=args.compile,
        model=model,
        batch=1 if args.batch_size is None else args.batch_size,
        k=k,
        context=_usual_context(model, k) if args.context is None else args.context,
        gemm=args.gemm or "triton",
        method=method,
        drafter=None if drafter == OWN_SHAPE else drafter,
        num_layers=args.layers,
        page_size=args.page_size,
        kv_cache_dtype=args.kv_cache_dtype,
        tensor_parallel_size=1 if args.tensor_parallel_size is None else args.tensor_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        collectives=args.collectives or "auto",
        quantization=args.quantization,
        narrow=tuple((name, speculation[name]) for name in _NARROW if speculation.get(name)),
    )


def _usual_context(model: str, k: int) -> int:
    """Return 2048, or fewer tokens if the model has no room for two more rounds after them."""
    longest = open_model(model, takes_configs=True).target.max_position
    return min(2048, longest - 2 * (k + 1))


def as_json(report: StepReport) -> dict[str, Any]:
    """Return the report as JSON-compatible types."""
    made = asdict(report)
    for name in "verify", "step":
        moved = getattr(report, name)
        made[name] = {
            "moved_bytes": moved.moved,
            "minimum_bytes": moved.minimum,
            "ratio": moved.ratio,
            "minimum_bytes_with_activations": moved.with_activations,
            "ratio_with_activations": moved.ratio_with_activations,
        }
    made["request"]["model"] = str(report.request.model)
    return {
        **made,
        "is_state_in_place": report.is_state_in_place,
        "num_launches": report.num_launches,
        "collectives": [asdict(one) for one in report.collectives],
        "num_launches_asked": sum(one.times for one in report.asked),
        "num_bytes_asked": sum(one.num_bytes for one in report.asked),
        "num_bytes": report.num_bytes,
    }


def as_lines(report: StepReport) -> Iterator[str]:
    """Yield the report as lines of text."""
    yield from _about(report)
    yield from _graph(report)
    yield from _launches(report)
    if report.request.tensor_parallel_size > 1:
        yield from _collectives(report)
    yield from _bytes(report)
    yield from _resources(report)
    yield "memory"
    for name, value in report.memory.items():
        yield _line(name, as_size(value))
    yield _line("state", as_size(report.state_bytes))
    in_place = "yes" if report.is_state_in_place else "NO"
    beside = report.memory["output"] - report.memory["alias"]
    yield _line("state is updated in place", f"{in_place}; other outputs: {as_size(beside)}")
    yield "seconds"
    for name, value in report.seconds.items():
        yield _line(name, f"{value:.1f}")


def _about(report: StepReport) -> Iterator[str]:
    request = report.request
    compiled = request.num_layers or report.num_layers
    drafts = "no drafts" if request.k == 0 else f"{request.k} drafts"
    drafter = {None: "no drafter", "mtp": "the model's own module", "eagle": OWN_SHAPE}
    yield f"decode step of {request.model} on {request.target}"
    yield _line("requests", f"{request.batch} of {request.context} tokens, {drafts}, bfloat16")
    if request.quantization is not None:
        yield _line("quantization", request.quantization)
    yield _line("drafter", request.drafter or drafter.get(request.method, str(request.method)))
    if request.narrow:
        yield _line("drafter's weights", ", ".join(f"{name} {x}" for name, x in request.narrow))
    yield _line("layers", f"{compiled} of {report.num_layers}")
    yield _line("GEMMs", request.gemm)
    if request.tensor_parallel_size > 1:
        experts = "; each has whole experts" if request.enable_expert_parallel else ""
        each = f"{request.tensor_parallel_size}{experts}; all figures are of each of them"
        yield _line("GPUs", each)
        yield _line("collectives", request.collectives)


def _graph(report: StepReport) -> Iterator[str]:
    yield "CUDA graph"
    yield _line("one command buffer", "yes" if report.is_one_command_buffer else "NO")
    if not report.is_one_command_buffer:
        yield _line("launches by the host", str(sum(report.top_level.values())))
        yield _line("top level", value_text("", report.top_level))
    if report.unknown_loops:
        loops = ", ".join(report.unknown_loops)
        yield _line("loops of unknown length", f"{loops}: their contents count once")
    if report.uncaptured_conditionals:
        yield _line("conditionals outside", str(len(report.uncaptured_conditionals)))
    if report.large_copies:
        yield "copies of more than 30 MB"
        for one in report.large_copies:
            yield f"  {as_size(one.num_written):>10}  {describe(one)}  {one.shape}"
    else:
        yield _line("copies of more than 30 MB", "none")


def _launches(report: StepReport) -> Iterator[str]:
    yield "kernels"
    yield _line("step", str(report.num_launches["step"]))
    for part in PARTS:
        yield _line(f"  {part}", str(report.num_launches[part]))
    if later := report.observed_later:
        kept = f"the last {later.num_steps} steps or fewer, together"
        moved = f"{later.num_launches} kernels, {as_size(later.num_bytes)}"
        yield _line("  observed later", f"{kept}: {moved}")
    if not report.request.is_plain:
        yield from _asked(report)
    for kind, layers in report.layers.items():
        spread = str(layers.minimum)
        if layers.minimum != layers.maximum:
            spread += f" to {layers.maximum}"
        yield f"kernels of a {kind} layer: {spread} (layers: {layers.num_layers})"
        for one in layers.kernels:
            size = as_size(one.num_read + one.num_written)
            yield f"  {size:>10}  {describe(one)}"


def _asked(report: StepReport) -> Iterator[str]:
    num_asked = sum(one.times for one in report.asked)
    moved = sum(one.num_bytes for one in report.asked) - report.num_bytes["step"]
    yield "the same step, if requests ask for all: temperature, penalties, top-p, log-probabilities"
    yield _line("kernels", str(num_asked))
    yield _line("bytes moved in addition", as_size(moved))


def _collectives(report: StepReport) -> Iterator[str]:
    yield "collectives, with the bytes that each GPU contributes"
    yield _line("step", _sums(report.collectives))
    for kind, layers in report.layers.items():
        yield _line(f"  of a {kind} layer", _sums(layers.collectives))
    yield "  outside of the target's layers"
    for one in report.collectives:
        if not in_layer(one):
            yield f"  {as_size(one.times * one.num_read):>10}  {describe(one)}"


def _sums(found: Sequence[Launch]) -> str:
    """Return a text with the number of collectives of each kind, and the bytes of all together."""
    counts = Counter()
    for one in found:
        counts[one.kind] += one.times
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"
    return f"{listed}: {as_size(sum(one.times * one.num_read for one in found))}"


def _bytes(report: StepReport) -> Iterator[str]:
    minimum = "at least " if report.unknown_loops else ""
    for title, moved in ("target's forward pass", report.verify), ("whole step", report.step):
        yield f"bytes of the {title}"
        yield _line("moved", as_size(moved.moved))
        yield _line("minimum", as_size(moved.minimum))
        yield _line("ratio", f"{minimum}{moved.ratio:.4f} of weights, keys and values, and states")
        with_activations = f"{moved.ratio_with_activations:.4f}, with embedded rows"
        yield _line("ratio", f"{minimum}{with_activations} and new keys and values once more")


def _resources(report: StepReport) -> Iterator[str]:
    if report.resources is None:
        return
    yield "resources"
    if not report.resources:
        yield _line("Pallas kernels", "none")
    for one in report.resources:
        launch = "launched by Mosaic"
        if one.grid is not None and one.threads is not None:
            shape = "x".join(map(str, one.grid)), "x".join(map(str, one.threads))
            launch = f"grid {shape[0]}, threads {shape[1]}"
        shared = one.static_shared_bytes + (one.dynamic_shared_bytes or 0)
        spills = f"spills {one.spill_store_bytes} B out, {one.spill_load_bytes} B in"
        yield _line(
            one.name,
            f"{one.registers} registers, {spills}, {as_size(shared)} shared, {launch}",
        )


def _line(name: str, value: str) -> str:
    return f"  {name:30}{value}"
