"""Turns a model and the options of an LLM into everything from which its engine is built."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from rich.filesize import decimal

from specjax.checkpoint.hub import resolve
from specjax.checks import check_choice
from specjax.config import EngineConfig, SpeculativeConfig
from specjax.device.drafters.drafter import Drafter, NoDrafter, Params
from specjax.device.drafters.narrow import narrow_drafter, with_head_copy
from specjax.device.loading import Log, no_log
from specjax.device.models.model import Model, page_windows
from specjax.device.models.registry import load_weights
from specjax.device.parallel import divide_params, shapes_like, shapes_of
from specjax.device.placement import Placement, default_device, local_shape
from specjax.device.verification import Verification, make_verification
from specjax.device.weights.stored import dequantise
from specjax.device.weights.weight import second_form_bytes
from specjax.engine.engine import Engine
from specjax.engine.executables import keep_programs
from specjax.engine.follower import Follower
from specjax.engine.hosts import Hosts
from specjax.engine.leader import LeaderPrograms
from specjax.engine.log import get_log
from specjax.engine.meeting import Meeting
from specjax.engine.process import check_jax
from specjax.engine.replicas import ReplicatedEngine
from specjax.engine.simulated import SimulatedPrograms
from specjax.host.drafts.suggester import Suggester
from specjax.host.speculation.policy import Policy
from specjax.host.speculation.profile import Profile
from specjax.sampling_params import SamplingParams
from specjax.serving.agreement import agree_on_files, agreed_config, lead
from specjax.serving.defaults import (
    DtypeChoice,
    check_options,
    choose_dtype,
    choose_kernels,
    make_config,
)
from specjax.serving.drafters import with_method
from specjax.serving.dynamic_k import check_profile, fingerprint, policy_of, read_profile
from specjax.serving.memory import (
    CacheBytes,
    EngineNeeds,
    drafter_cache_bytes,
    target_cache_bytes,
    usual_num_seqs,
    weight_bytes,
)
from specjax.serving.page_formats import choose_pages
from specjax.serving.source import ModelSource, open_drafter, open_model
from specjax.text.generation_config import read_default_params
from specjax.text.tokenizer import ChatTokenizer, load_tokenizer, read_eos_ids
from specjax.vllm_names import without_draft_size

# Makes an engine's `Programs`, by the option `device`; None for `Engine.make_programs`.
DEVICES: Mapping[str, Any] = {"auto": None, "simulated": SimulatedPrograms}


@dataclass(frozen=True)
class Plan:
    """The model to serve, its drafter and the engine's sizes, before weights are loaded."""

    source: ModelSource
    dtype: DtypeChoice
    config: EngineConfig
    speculation: SpeculativeConfig | None
    profile: Profile | None  # the profile from which K is chosen, if any
    drafter: Drafter
    drafter_params: Any  # only shapes if there is no placement, or no weights (see `open_drafter`)
    weights: int  # bytes of weights that are not loaded yet, and of copies for kernels
    chooses_snapshots: bool = False  # whether num_snapshots depends on the free memory

    @property
    def num_drafts(self) -> int:
        """The maximum number of draft tokens per request in a round."""
        return self.speculation.num_speculative_tokens if self.speculation else 0

    @property
    def head_bytes(self) -> int:
        """The bytes, per device, of the drafter's quantised copy of an output head; 0 if none."""
        target = shapes_of(self.source.specs, self.dtype.name)
        if self.source.params is not None and self.source.target.num_devices == 1:
            target = shapes_like(self.source.target, self.source.params)
        params = Params(target, self.drafter_params)
        if self.drafter.weights is not None:
            params = params._replace(drafter=shapes_like(self.drafter.weights, params.drafter))
        made = with_head_copy(params, self.drafter, self.speculation)
        each = map(local_shape, jax.tree.leaves(made.head))
        return sum(x.size * x.dtype.itemsize for x in each)

    def cache_bytes(self, dtype: str) -> tuple[CacheBytes, CacheBytes]:
        """Return the `CacheBytes` of the target, and the `CacheBytes` of the drafter.

        These are bytes per page, per request slot, and per page of each window's layers. They are
        counted on each device. `dtype` is the dtype of pages that are not stored in 8 bits.
        """
        target, config = self.source.target, self.config
        sizes = config.page_size, self.num_drafts, dtype
        windows = page_windows(target, config)
        return (
            target_cache_bytes(target, *sizes, windows, config.page_format),
            drafter_cache_bytes(self.drafter, *sizes, config.draft_page_format),
        )

    def fitted(self, *, num_pages: int | None, gpu_memory_utilization: float) -> EngineConfig:
        """Return the config with the final numbers of pages and snapshots.

        If `num_pages` is None, there are pages for every request at full length, or as many as fit
        in the device's memory. If `num_snapshots` is not set, it gets the default; see
        `EngineNeeds.usual_snapshots`.

        Raises:
            ValueError: `num_pages`, or a single request, does not fit.
        """
        own, drafters = self.cache_bytes(self.dtype.name)
        cache, config, target = own + drafters, self.config, self.source.target
        needs = EngineNeeds.of(config, target, self.drafter, cache, self.weights, self.num_drafts)
        if self.chooses_snapshots and needs.snapshots:
            count = needs.usual_snapshots(config, cache, gpu_memory_utilization, self.num_drafts)
            config = replace(config, num_snapshots=count)
            needs = needs._replace(snapshots=count * cache.per_slot)
        if num_pages is None:
            config = needs.fitted(config, cache, gpu_memory_utilization, self.num_drafts)
        needs.check(config, cache, self.num_drafts)
        return config


class Replica(NamedTuple):
    """A replica's weights, its policy (which chooses K), its suggester and its devices.

    The suggester drafts from texts.
    """

    params: Params
    policy: Policy
    suggester: Suggester
    placement: Placement


@dataclass(frozen=True)
class Serving:
    """Everything from which an engine and its requests are built."""

    target: Model
    drafter: Drafter
    replicas: tuple[Replica, ...]
    config: EngineConfig
    verification: Verification | None
    tokenizer: ChatTokenizer | None
    eos_ids: tuple[int, ...]
    default_params: SamplingParams  # from the checkpoint's generation_config.json
    method: str | None  # drafting method
    hosts: Hosts | None  # the other processes, if any
    device: str = "auto"  # a name in `DEVICES`

    def build_engine(self, *, show_progress: bool) -> Engine:
        """Return the engine. If there are several replicas, return a `ReplicatedEngine` instead."""
        make: Any = DEVICES[self.device] or Engine.make_programs
        if self.hosts is not None:
            make = partial(LeaderPrograms, hosts=self.hosts, make=make)
        with self.hosts or nullcontext():
            engines = [
                Engine(
                    self.config,
                    self.target,
                    self.drafter,
                    one.params,
                    one.policy,
                    self.verification,
                    one.suggester,
                    placement=one.placement,
                    make_programs=make,
                    show_progress=show_progress,
                )
                for one in self.replicas
            ]
        return engines[0] if len(engines) == 1 else cast(Engine, ReplicatedEngine(engines))

    def follow(self) -> None:
        """Run the steps of process 0's engine until it is closed; see `Follower`."""
        assert self.hosts is not None
        make: Any = DEVICES[self.device] or Engine.make_programs
        own = self.replicas[0]
        parts = self.target, self.drafter, own.params, own.placement
        Follower(self.hosts, *parts, make).follow()


def make_plan(
    source: ModelSource,
    *,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
    dtype: str = "auto",
    max_num_seqs: int | None = None,
    num_pages: int | None = None,
    page_size: int = 16,
    kv_cache_dtype: str = "auto",
    kv_cache_dtype_skip_layers: Any = None,
    placement: Placement | None = None,
    log: Log = no_log,
    **sizes: Any,
) -> Plan:
    """Return a plan: choose the engine's sizes, and open the drafter.

    `sizes` are all other options of `EngineConfig`. The drafter's parameters are loaded onto the
    devices of `placement`. If it is None, the plan has only the shapes of the parameters. `log` is
    called with lines of text about the drafter's files.

    Raises:
        ValueError: options contradict each other, or do not fit the model or the device's memory.
        CheckpointError: the drafter's files are missing, damaged, or not for this target.
    """
    speculation = profile = None
    if speculative_config is not None:
        speculation, profile = read_profile(SpeculativeConfig.of(speculative_config))
    plain = source
    own = kv_cache_dtype, kv_cache_dtype_skip_layers, log, sizes.get("kernels", "auto")
    pages = choose_pages(source, speculation, *own)
    source = pages.source
    target, chosen = source.target, choose_dtype(dtype, source.dtype)
    num_drafts = speculation.num_speculative_tokens if speculation else 0
    weights = 0 if source.params is not None else weight_bytes(source.specs, chosen.name)
    platform = default_device().platform
    if target.num_devices == 1:
        weights += second_form_bytes(platform, chosen.name, source.specs)
    if max_num_seqs is None:
        max_num_seqs = usual_num_seqs(target, num_drafts, chosen.name, weights)
    config = make_config(
        target,
        max_num_seqs=max_num_seqs,
        num_pages=num_pages,
        page_size=page_size,
        dtype=chosen.name,
        page_format=pages.target,
        draft_page_format=pages.drafter,
        **sizes,
    )
    plan = Plan(source, chosen, config, speculation, profile, NoDrafter(), None, weights)
    plan = replace(plan, chooses_snapshots=sizes.get("num_snapshots") is None)
    if num_pages is not None:  # before anything is read
        plan.fitted(num_pages=num_pages, gpu_memory_utilization=1.0)
    if speculation is None:
        return plan
    drafter, params = open_drafter(speculation, plain, chosen.name, placement, log)
    if placement is None and drafter.weights is not None:  # nothing runs: all is on one device
        params = shapes_like(drafter.weights, params)
    params = narrow_drafter(params, speculation, log)
    if target.num_devices == 1:
        weights += second_form_bytes(platform, chosen.name, params)
    plan = replace(plan, drafter=drafter, drafter_params=params)
    return replace(plan, weights=weights + plan.head_bytes)


def assemble(model: str | Path | Model, hosts: Hosts | None = None, **options: Any) -> Serving:
    """Load everything that the options of an LLM (`LLMOptions`) describe.

    `hosts` is None in process 0. Each other process passes its connection with process 0.

    Raises:
        ValueError: options contradict each other, or do not fit the model or the device's memory.
        CheckpointError: files are missing, damaged or of the wrong kind.
        RuntimeError: other processes do not connect in time, or have ended.
    """
    check_choice("device", options["device"], tuple(DEVICES))
    meeting = Meeting.take(options)
    hosts = hosts or lead(model, meeting, options)
    device = options.pop("device")
    if device == "simulated":
        log = get_log(verbose=options["verbose"])
        log.warning("the device is simulated: no model runs, and outputs mean nothing")
    with hosts or nullcontext():
        return replace(_assemble(model, hosts, **options), device=device)


def _assemble(
    model: str | Path | Model,
    hosts: Hosts | None,
    *,
    params: Any,
    gpu_memory_utilization: float,
    tensor_parallel_size: int,
    data_parallel_size: int,
    enable_expert_parallel: bool,
    quantization: str | None,
    compilation_cache: str | Path | None,
    verbose: bool,
    **options: Any,
) -> Serving:
    check_jax()
    check_options(
        nnodes=1 if hosts is None else hosts.count,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        quantization=quantization,
        gpu_memory_utilization=gpu_memory_utilization,
        compilation_cache=compilation_cache,
        verbose=verbose,
    )
    if (speculation := options["speculative_config"]) is not None:
        named = model if isinstance(model, str | Path) else None
        speculation = without_draft_size(speculation, tensor_parallel_size)
        options["speculative_config"] = with_method(speculation, named)
    options["kernels"] = choose_kernels(options["kernels"])
    placement, *others = _placements(data_parallel_size, tensor_parallel_size, hosts)
    log = get_log(verbose=verbose)
    source = open_model(
        model,
        params,
        num_devices=tensor_parallel_size,
        divides_experts=enable_expert_parallel,
        quantization=quantization,
        log=log.info,
    )
    folder = source.folder
    if hosts is not None and folder is not None:
        own = getattr(options["speculative_config"], "model", None)
        agree_on_files(hosts, folder, own and resolve(own))
    tokenizer, eos_ids, default_params = None, (), SamplingParams()
    if folder is not None:
        tokenizer = load_tokenizer(folder)
        eos_ids = read_eos_ids(folder, tokenizer)
        default_params = read_default_params(folder)
    plan = make_plan(source, placement=placement, log=log.info, **options)
    source, dtype, speculation = plan.source, plan.dtype.name, plan.speculation
    target = source.target
    config = plan.fitted(
        num_pages=options["num_pages"], gpu_memory_utilization=gpu_memory_utilization
    )
    if hosts is not None:
        config = agreed_config(hosts, config)
    params = _load(source, dtype, placement, log.info)
    drafter, drafter_params = plan.drafter.share(plan.drafter_params, target, params)
    both = with_head_copy(Params(params, drafter_params), drafter, speculation)
    if speculation and plan.profile:
        check_profile(plan.profile, fingerprint(target, drafter, both), speculation)
    keep_programs(None if compilation_cache is None else Path(compilation_cache).expanduser())
    placed = (both, placement), *((one.copy(both), one) for one in others)
    choose = partial(policy_of, speculation, plan.profile, config.decode_batches)
    return Serving(
        target,
        drafter,
        tuple(Replica(own, choose(), Suggester.of(speculation), place) for own, place in placed),
        config,
        make_verification(speculation) if speculation else None,
        tokenizer,
        eos_ids,
        default_params,
        speculation.method if speculation else None,
        hosts,
    )


def _load(source: ModelSource, dtype: str, placement: Placement, log: Log) -> Any:
    """Load a model's weights from its folder, or take its given arrays; place them on devices."""
    size = decimal(weight_bytes(source.specs, dtype))
    log(f"loading {source.folder or source.origin}: {size} of weights in {dtype}")
    if source.folder is not None:
        given = source.folder, source.target, np.dtype(dtype), placement, log
        return load_weights(*given, source.quantization)
    params = source.params
    if source.target.num_devices > 1:
        params = divide_params(source.target, dequantise(params, dtype), placement)
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.array(x), params)


def _placements(num_replicas: int, size: int, hosts: Hosts | None) -> list[Placement]:
    """Return the placement of each replica. Each replica has `size` devices.

    If there are several processes, each process contributes the same number of devices.
    """
    devices = jax.local_devices()
    if hosts is not None:
        num_here = size // hosts.count
        each = (jax.local_devices(process) for process in range(hosts.count))
        devices = [device for local in each for device in local[:num_here]]
    return [Placement.on(*devices[i * size : (i + 1) * size]) for i in range(num_replicas)]
