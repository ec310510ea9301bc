"""Converts weights between flax nnx and the engine, in both directions.

`PolicyModule` wraps an engine's model as an nnx module, which nnx and optax can train. The module's
state can be passed to `RolloutEngine.update_weights`. For any other model, `hf_named` applies rules
to the model's state, and yields arrays with the names and layouts of a Hugging Face checkpoint.
These arrays can be passed to `update_weights`, too. Transferring weights builds no second model.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoint.given import as_array, as_arrays, paths
from specjax.device.models.model import Model
from specjax.device.weights.weight import is_weight
from specjax.rl.named import variable_paths
from specjax.train.context import CausalRows

Names = Mapping[str, "str | ArrayRule"]


class PolicyModule(nnx.Module):
    """An engine's model as a trainable module.

    Its parameters have the paths of the engine's tree (`layers.0.attention.qkv`), so
    `nnx.state(policy, nnx.Param)` can be passed to `RolloutEngine.update_weights` unchanged. The
    parameters are copies, so an optimiser can donate them.

    Args:
        target: the model, such as `RolloutEngine.target`.
        params: the model's parameters, such as `RolloutEngine.params.target`.
        dtype: the dtype to which floating-point parameters are cast; None keeps their dtypes.

    Raises:
        ValueError: the model is divided over several devices, or an array cannot be read.
    """

    def __init__(self, target: Model, params: Any, dtype: Any = None):
        if target.num_devices > 1:
            raise ValueError(
                f"the target is divided over {target.num_devices} devices, and a PolicyModule "
                "needs a whole model; make it from an engine with tensor_parallel_size=1"
            )
        params = as_arrays(params, "params")
        self.target = target
        self.structure = jax.tree.structure(params)
        self.paths = tuple(paths(params))
        for name, child in _children(params):
            setattr(self, name, _module(child, dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits f32[B, T, V] of the sequences `tokens` i32[B, T].

        All sequences start at position 0. Shorter sequences must be padded on the right, since
        attention is causal.
        """
        params = self.params()
        rows = CausalRows.of(*tokens.shape)
        features, _ = self.target.extend(params, tokens.reshape(-1), rows, None)
        return self.target.logits(params, features.hidden).reshape(*tokens.shape, -1)

    def params(self) -> Any:
        """Return this module's arrays in a tree like the engine's, without copying them."""
        return jax.tree.unflatten(self.structure, [_at(self, path)[...] for path in self.paths])


class _Branch(nnx.Module):
    """A node of the engine's tree, with its children as attributes."""


def _module(tree: Any, dtype: Any) -> Any:
    if isinstance(tree, tuple | list):
        return nnx.List([_module(child, dtype) for child in tree])
    if children := _children(tree):
        branch = _Branch()
        for name, child in children:
            setattr(branch, name, _module(child, dtype))
        return branch
    if tree is None:
        return None
    tree = tree.values if is_weight(tree) else tree
    is_cast = dtype is not None and jnp.issubdtype(tree.dtype, jnp.floating)
    return nnx.Param(jnp.array(tree, dtype if is_cast else None, copy=True))


def _children(tree: Any) -> list[tuple[str, Any]]:
    if is_dataclass(tree) and not is_weight(tree):
        return [(field.name, getattr(tree, field.name)) for field in fields(tree)]
    return list(tree.items()) if isinstance(tree, Mapping) else []


def _at(node: Any, path: str) -> Any:
    for key in path.split("."):
        node = node[int(key)] if key.isdigit() else getattr(node, key)
    return node


@dataclass(frozen=True)
class ArrayRule:
    """A rule that converts an array of another model to one or more tensors of a checkpoint.

    Attributes:
        name: the name of the tensor in the checkpoint. A "*" in the name is replaced by the text
            that the corresponding "*" in the rule's path pattern matched; see `hf_named`. A "#" is
            replaced by the index along an axis of `stacked`.
        layout: a function that converts a tensor to the checkpoint's layout, in which the weights
            of projections are [out, in].
        stacked: the array's axes along which tensors are stacked, as for scanned layers or experts.
        is_optional: whether a model may lack the array. For example, a model whose output head is
            tied to the embedding has no array for the head.
    """

    name: str
    layout: Callable[[Any], Any] = lambda array: array
    stacked: tuple[int, ...] = ()
    is_optional: bool = False

    def __post_init__(self):
        if self.name.count("#") != len(self.stacked):
            raise ValueError(
                f"name={self.name!r} has {self.name.count('#')} '#' for the {len(self.stacked)} "
                f"axes of stacked={self.stacked}; write one for each axis"
            )

    def tensors(self, matched: tuple[str, ...], array: Any) -> Iterator[tuple[str, Any]]:
        """Yield a pair (name, tensor) for each tensor of the checkpoint that the array becomes.

        `matched` has the text that each "*" of the rule's path pattern matched.
        """
        name = _filled(self.name, "*", matched)
        num_stacked = len(self.stacked)
        rows = jnp.moveaxis(array, self.stacked, range(num_stacked)) if num_stacked else array
        for index in np.ndindex(rows.shape[:num_stacked]):
            yield _filled(name, "#", index), self.layout(rows[index])


def transposed(array: Any) -> Any:
    """Convert a projection's weight [in, out] to [out, in]."""
    return array.T


def from_heads(array: Any) -> Any:
    """Convert a weight [D, heads, size], as of a query projection, to [heads * size, D]."""
    dim, heads, size = array.shape
    return array.reshape(dim, heads * size).T


def to_heads(array: Any) -> Any:
    """Convert a weight [heads, size, D], as of an output projection, to [D, heads * size]."""
    heads, size, dim = array.shape
    return array.reshape(heads * size, dim).T


def hf_named(
    state: Any, names: Names, *, lora_scale: float | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of an nnx model as (name, tensor) pairs of a Hugging Face checkpoint.

    Args:
        state: `nnx.state(model, nnx.Param)`, or nested mappings of arrays, such as a restored
            checkpoint. If all paths end in ".value", this suffix is ignored.
        names: rules by path pattern. In a pattern such as "layers.*.attn.q_proj.w", "*" matches one
            part of the path. A rule can be just a tensor's name; the array then keeps its layout.
        lora_scale: alpha / rank of the LoRA adapters in the state. The adapters `x_lora_a` and
            `x_lora_b` are merged into the weight `x`.

    Raises:
        ValueError: an array cannot be read; or there are paths without a rule or with several
            rules, rules without a path, duplicate names, or adapters without `lora_scale`. The
            error lists them, and is raised before the first tensor. During the iteration, an array
            whose shape does not fit its rule also raises a ValueError.
    """
    given = variable_paths(state, "state")
    arrays = _merged({path: as_array(x, path, "state") for path, x in given.items()}, lora_scale)
    rules = {
        pattern: ArrayRule(rule) if isinstance(rule, str) else rule
        for pattern, rule in names.items()
    }
    chosen = {path: [p for p in rules if _matched(p, path) is not None] for path in arrays}
    _check(chosen, rules)
    return _tensors(arrays, {path: found for path, (found,) in chosen.items()}, rules)


def _tensors(
    arrays: Mapping[str, Any], patterns: Mapping[str, str], rules: Mapping[str, ArrayRule]
) -> Iterator[tuple[str, Any]]:
    for path, array in arrays.items():
        rule, matched = rules[patterns[path]], _matched(patterns[path], path)
        assert matched is not None
        try:
            yield from rule.tensors(matched, array)
        except ValueError as error:
            raise ValueError(
                f"{path}, of shape {list(array.shape)}, cannot be laid out as {rule.name}: {error}"
            ) from error


def _merged(arrays: dict[str, Any], lora_scale: float | None) -> dict[str, Any]:
    """Merge LoRA adapters into their weights: w + scale A B."""
    firsts = [path for path in arrays if path.endswith("_lora_a")]
    if firsts and lora_scale is None:
        raise ValueError(
            f"the state has LoRA adapters ({', '.join(firsts)}); pass lora_scale=alpha / rank to "
            "merge them into the weights"
        )
    merged = dict(arrays)
    for first in firsts:
        base, second = first.removesuffix("_lora_a"), first.removesuffix("a") + "b"
        if lacking := [path for path in (base, second) if path not in arrays]:
            raise ValueError(
                f"{first} is without {' and '.join(lacking)}; pass the state with the adapters and "
                "the weights that they adapt, nnx.state(model, nnx.Param)"
            )
        a, b, weight = merged.pop(first), merged.pop(second), arrays[base]
        rank = a.shape[-1]
        delta = (a.reshape(-1, rank) @ b.reshape(rank, -1)).reshape(weight.shape)
        merged[base] = (weight + lora_scale * delta).astype(weight.dtype)
    return merged


def _matched(pattern: str, path: str) -> tuple[str, ...] | None:
    """Return the text that each "*" of a pattern matches in a path; None without a match."""
    found = re.fullmatch(re.escape(pattern).replace(r"\*", "([^.]+)"), path)
    return found.groups() if found else None


def _filled(name: str, mark: str, parts: Iterable[object]) -> str:
    for part in parts:
        name = name.replace(mark, str(part), 1)
    return name


def _check(chosen: Mapping[str, list[str]], rules: Mapping[str, ArrayRule]) -> None:
    """Raise a ValueError that lists all arrays and rules that do not fit each other."""
    used = {pattern for found in chosen.values() for pattern in found}
    named = {
        path: (rules[pattern].name, _matched(pattern, path))
        for path, found in chosen.items()
        for pattern in found
    }
    times = Counter(named.values())
    complaints = {
        "paths without a rule": [path for path, found in chosen.items() if not found],
        "paths with several rules": [
            f"{path} ({' and '.join(found)})" for path, found in chosen.items() if len(found) > 1
        ],
        "rules without a path": [
            pattern for pattern in rules if pattern not in used and not rules[pattern].is_optional
        ],
        "paths of one name": [path for path in named if times[named[path]] > 1],
        "rules with another number of '*' in the name": [
            pattern for pattern, rule in rules.items() if pattern.count("*") != rule.name.count("*")
        ],
    }
    if any(complaints.values()):
        listed = "; ".join(f"{what}: {', '.join(all)}" for what, all in complaints.items() if all)
        raise ValueError(
            f"names do not fit the state: {listed}. Give every path one rule, mark those that may "
            "be absent is_optional, and leave out all but parameters (nnx.state(model, nnx.Param))"
        )
