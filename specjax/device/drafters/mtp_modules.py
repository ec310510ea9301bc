"""Drafting with several MTP modules (DeepSeek-V3, section 2.2): module i makes draft token i + 1.

Each module has a cache with a row for each position p. In all modules, this row takes the token
x_{p+1}. It also takes a hidden state. In module 0, this is the target's state h_p. In module i > 0,
it is the output of module i - 1 at position p - 1, or zero if p = 0.

Let x_n be the last token. Draft token i + 1 comes from module i at position n - 1 + i. A module's
rows from position n on take drafts of this round as tokens. If there are more draft tokens than
modules, the last module makes the rest. As hidden state, it then takes its own previous output.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoint.division import Share
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.drafter import DraftContext, Observation, Params
from specjax.device.drafters.head import HeadDrafter
from specjax.device.drafters.mtp import MTPHead, MTPParams
from specjax.device.models.model import Model
from specjax.device.verification import Draft


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModulesParams:
    """Weights of several MTP modules."""

    modules: tuple[MTPParams, ...]


@dataclass(frozen=True)
class ModulesHead:
    """The MTP modules of a target; see `DrafterWeights`."""

    modules: tuple[MTPHead, ...]
    has_embedding: bool = False
    aux_layers: tuple[int, ...] = ()

    @property
    def prefix_in_target(self) -> str:
        """The name prefix of the first module's tensors."""
        return self.modules[0].prefix_in_target

    @property
    def num_devices(self) -> int:
        """See `Divisible`."""
        return self.modules[0].num_devices

    @property
    def shares(self) -> Mapping[str, Share]:
        """See `Divisible`."""
        return self.modules[0].shares

    @property
    def local(self) -> "ModulesHead":
        """See `Divisible`."""
        return replace(self, modules=tuple(module.local for module in self.modules))

    @property
    def copies(self) -> Mapping[str, str]:
        """Names of module tensors that should equal a tensor of the target.

        Each name is mapped to the name of the target's tensor, which is used instead.
        """
        return {name: own for module in self.modules for name, own in module.copies.items()}

    def drafter(self, is_greedy: bool) -> "ModulesDrafter":
        """Return the drafter that runs the modules."""
        return ModulesDrafter(self, is_greedy)

    def specs(self, names: Collection[str] = ()) -> ModulesParams:
        """Return the weights as `TensorSpec`s; see `MTPHead.specs`."""
        return ModulesParams(tuple(module.specs(names) for module in self.modules))

    def is_unused(self, name: str) -> bool:
        """See `DrafterWeights.is_unused`."""
        return all(module.is_unused(name) for module in self.modules)

    def target_ids(self, params: ModulesParams) -> None:
        """Return None: drafts use the target's full vocabulary."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModulesState:
    """The caches of the M modules, and their next inputs.

    `hidden` holds M hidden states at the last verified row: the target's hidden state, then the
    output of every module except the last.
    """

    kv: tuple[Any, ...]
    hidden: jax.Array  # [S, M, D]
    snapshots: jax.Array  # [snapshots, M, D], snapshots of `hidden`


@dataclass(frozen=True)
class ModulesDrafter(HeadDrafter[ModulesHead]):
    """A drafter that runs one module per draft token, and the last module for further tokens."""

    @property
    def is_recurrent(self) -> bool:
        """True: drafting needs outputs of modules, which are not stored in pages."""
        return True

    def num_passes(self, k: int) -> int:
        """Return k: each draft takes one pass."""
        return k

    def init_state(self, sizes: CacheSizes, dtype: Any) -> ModulesState:
        """Return a state with empty caches, which are indexed by the target's page table."""
        modules = self.head.modules
        shape = len(modules), modules[0].hidden_size
        return ModulesState(
            tuple(module.cache_kind.init(sizes, dtype) for module in modules),
            jnp.zeros((sizes.num_slots, *shape), dtype),
            jnp.zeros((sizes.num_snapshots, *shape), dtype),
        )

    def take(
        self, state: ModulesState, slots: jax.Array, ids: jax.Array, ends: jax.Array
    ) -> ModulesState:
        """See `Drafter.take`."""
        kept = state.hidden.at[slots].get(mode="fill", fill_value=0)
        return replace(state, snapshots=state.snapshots.at[ids].set(kept, mode="drop"))

    def restore(
        self, state: ModulesState, slots: jax.Array, ids: jax.Array, ends: jax.Array
    ) -> ModulesState:
        """See `Drafter.restore`."""
        kept = state.snapshots.at[ids].get(mode="fill", fill_value=0)
        return replace(state, hidden=state.hidden.at[slots].set(kept, mode="drop"))

    def draft(
        self, target: Model, params: Params, state: ModulesState, context: DraftContext, k: int
    ) -> tuple[Draft, ModulesState]:
        """See `Drafter.draft`.

        Module i makes draft i, counted from 0. It has not run the rows of this round's earlier
        drafts yet. So it runs these rows together with the row that gives draft i.
        """
        hidden, kv = state.hidden[context.slots], list(state.kv)
        starts, most = context.starts, len(self.head.modules)
        last = context.history.tokens[jnp.arange(len(starts)), starts]
        drafts: list[jax.Array] = []
        probs: list[jax.Array] = []
        made = hidden[:, :0]  # [B, rows from position n on, D], outputs of the previous module
        for i in range(k):
            number = min(i, most - 1)
            if i == 0:  # the cache already holds this row's keys and values
                first, tokens, inputs = starts - 1, last[:, None], hidden[:, :1]
            elif i < most:
                first, tokens = starts, jnp.stack(drafts, axis=1)
                inputs = jnp.concatenate([hidden[:, i : i + 1], made], axis=1)
            else:
                first, tokens, inputs = starts - 1 + i, drafts[-1][:, None], made[:, -1:]
            out, kv[number] = self._run(target, params, number, context, first, tokens, inputs, kv)
            made = out if i else made
            logits = self.head.modules[number].logits(target, params, out[:, -1])
            token, q = context.draw(
                logits, None, target.vocab_size, drafts, is_greedy=self.is_greedy
            )
            drafts.append(token)
            probs += [] if q is None else [q]
        return Draft.stacked(drafts, probs, len(starts)), replace(state, kv=tuple(kv))

    def _run(self, target, params, number, context, first, tokens, inputs, kv):
        """Run module `number` on `tokens` i32[B, T] and hidden states `inputs` [B, T, D].

        Request b's rows have positions from `first[b]` on. Return the output [B, T, D] and the
        module's new cache.
        """
        count = tokens.shape[1]
        writes = number > 0
        rows = context.rows_at(first, counts=count, most=count, writes=writes)
        padding = (0, 0), (0, rows.width - count)
        tokens, inputs = jnp.pad(tokens, padding), jnp.pad(inputs, (*padding, (0, 0)))
        out, kv = self._extend(target, params, number, tokens, inputs, rows, kv[number])
        return out[:, :count], kv

    def _extend(self, target, params, number, tokens, inputs, rows, kv):
        """Run module `number` on `rows` with `tokens` i32[B, T] and states `inputs` [B, T, D].

        `kv` is the module's cache. Return the output [B, T, D] and the new cache.
        """
        own = Params(params.target, params.drafter.modules[number])
        flat = tokens.reshape(-1), inputs.reshape(-1, inputs.shape[-1])
        out, kv = self.head.modules[number].extend(target, own, *flat, rows, kv)
        return out.reshape(inputs.shape), kv

    def observe(
        self, target: Model, params: Params, state: ModulesState, seen: Observation
    ) -> ModulesState:
        """Run the modules on the rows that the target ran; see `Drafter.observe`.

        The last module computes only keys and values.
        """
        begins = seen.rows.by_request(seen.rows.positions)[:, :1] == 0
        before = state.hidden.at[seen.slots].get(mode="fill", fill_value=0)
        before = jnp.where(begins[..., None], 0, before)
        out = seen.features.hidden.reshape(*seen.following.shape, -1)
        at_last, row, kv = [], jnp.arange(len(seen.last)), list(state.kv)
        for i in range(len(kv)):
            at_last.append(out[row, seen.last])
            inputs = out
            if i:
                inputs = jnp.concatenate([before[:, i : i + 1], out[:, :-1]], axis=1)
            rows = replace(seen.rows, attends=i < len(kv) - 1)
            out, kv[i] = self._extend(target, params, i, seen.following, inputs, rows, kv[i])
        hidden = state.hidden.at[seen.slots].set(jnp.stack(at_last, axis=1), mode="drop")
        return replace(state, kv=tuple(kv), hidden=hidden)
