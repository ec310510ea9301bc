"""Launches decode steps repeatedly without an engine, and without other work on the device."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from engines import Models, lengths
from timing import Setting

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Variant
from specjax.device.layout import Layout
from specjax.device.verification import Synthetic
from specjax.engine.programs import Decode, Propose
from specjax.engine.replay import pack_round, progress_at
from specjax.engine.step_model import empty_state, sizes_of_windows, step_model
from specjax.engine.tracing import Static, jitted
from specjax.engine.xla_options import GPU_OPTIONS


class Step:
    """A program for rounds, or only for their drafts, of artificial requests that never end."""

    def __init__(
        self,
        models: Models,
        config: EngineConfig,
        k: int,
        rates: tuple[float, ...],
        setting: Setting,
        *,
        only_drafts: bool = False,
        max_drafts: int | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ):
        """Compile the program.

        Args:
            k: the number of drafts per round.
            rates: synthetic acceptance rates.
            only_drafts: whether to run only the drafter.
            max_drafts: the number of drafts that the state has room for, if it exceeds `k`.
            options: XLA options that are added to the engine's options.
        """
        platform = setting.pick("gpu", "cpu")
        self._params, batch = models.params, config.max_num_seqs
        model = step_model(config, models.target, models.drafter, Synthetic(rates), platform)
        layout = Layout.of(config, models.target.vocab_size, model.windows)
        most = max(k, max_drafts or 0)
        num_pages = config.num_pages, *(n for _, n in sizes_of_windows(config, model, most))
        self._packed = jnp.asarray(pack_round(batch, k, layout, num_pages))
        state = empty_state(config, model, most)
        tokens = np.random.default_rng(0).integers(0, layout.vocab_size, state.tokens.shape)
        limits = jnp.full_like(state.requests.limits, 2**30)
        state = replace(
            state,
            tokens=jnp.asarray(tokens, jnp.int32),
            requests=replace(state.requests, limits=limits),
        )
        self._start = lengths(setting)[0]
        self._state = jax.device_put(state, jax.devices()[0])
        program = (Propose if only_drafts else Decode)(batch, k, Variant())
        run = jitted(program, Static(model, layout))
        lowered = run.lower(self._params, self._state, self._packed)
        options = {} if setting.is_cpu else GPU_OPTIONS | dict(options)
        self._compiled = lowered.compile(compiler_options=options)
        self._most = max(1, (config.max_model_len - self._start) // (k + 1) - 1)
        self._count = self._most

    def equals(self, other: "Step") -> bool:
        """Return whether the states of both steps, including caches, are equal."""
        pairs = zip(*(jax.tree.leaves(step._state) for step in (self, other)), strict=True)
        return all(bool(jnp.array_equal(*pair)) for pair in pairs)

    def launch(self) -> Any:
        """Launch one step. Requests that have no room left start again."""
        if self._count >= self._most:
            self._state = replace(self._state, progress=progress_at(self._state, self._start))
            self._count = 0
        self._count += 1
        self._state, outputs = self._compiled(self._params, self._state, self._packed)
        return outputs
