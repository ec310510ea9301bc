"""Quantises the weights of drafters.

The target keeps its weights, and verifies every draft. So quantisation can lower the number of
accepted drafts, but it does not make outputs worse.
"""

from typing import Any

import jax

from specjax.checkpoint.given import dotted
from specjax.config import SpeculativeConfig
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.loading import Log, no_log
from specjax.device.weights.narrow import narrow
from specjax.device.weights.weight import Weight, is_weight

_HEADS = {"lm_head", "lm_heads"}
# Fields that are never quantised: embeddings are only looked up, and the other matrices are small
# ones that choose or weigh experts.
_PLAIN = {"embedding", "router", "shared_gate"}
_WHERE = "speculative_config"


def narrow_drafter(params: Any, config: SpeculativeConfig, log: Log = no_log) -> Any:
    """Return a drafter's parameters with projections quantised as `config` says.

    `config.head_dtype` applies to the drafter's own output heads, and `config.quantization` to all
    other projections. Two kinds of weights are unchanged: weights already quantised, and weights
    that cannot be quantised (see `narrow`). `log` receives a line with the number of weights of the
    second kind. If `params` are shapes, shapes are returned.

    Raises:
        ValueError: an option is set, but all weights to which it applies are quantised already.
    """
    chosen = {"quantization": config.quantization, "head_dtype": config.head_dtype}
    if not any(chosen.values()):
        return params
    named = [(dotted(path), x) for path, x in _weights(params)]
    for name, value in chosen.items():
        own = [(path, x) for path, x in named if _option_of(path) == name]
        if value and own and all(x.numbers for _, x in own):
            _refuse(name, value, own[0][0])
    made = _narrowed(params, chosen)
    plain = [dotted(path) for path, x in _weights(made) if not x.numbers]
    if kept := [path for path in plain if _value_for(path, chosen)]:
        log(
            f"{len(kept)} of the drafter's {len(named)} matrices stay plain, such as {kept[0]}: "
            f"{_value_for(kept[0], chosen)!r} does not exist for their kind, or their inputs on a "
            "device are not a multiple of its groups"
        )
    return made


def with_head_copy(params: Params, drafter: Drafter, config: SpeculativeConfig | None) -> Params:
    """Add `head` to `params`: a copy of the drafter's output head, quantised to `head_dtype`.

    Only the drafter uses the copy. The original does not change, because the target usually uses
    it, too. If `params` are shapes, the copy consists of shapes, too. `params` are returned
    unchanged if `head_dtype` is None, or if the drafter has its own output head, which
    `narrow_drafter` quantises.

    Raises:
        ValueError: the head to copy is quantised already.
    """
    value = config and config.head_dtype
    if not value or any(_option_of(dotted(p)) == "head_dtype" for p, _ in _weights(params.drafter)):
        return params
    head = drafter.head_of(params)
    if head.numbers:
        _refuse("head_dtype", value, "the output head")
    return params._replace(head=narrow(head, value))


def _narrowed(params: Any, chosen: dict[str, str | None]) -> Any:
    def of(path: Any, x: Any) -> Any:
        value = _value_for(dotted(path), chosen) if is_weight(x) and not x.numbers else None
        return narrow(x, value) if value else x

    return jax.tree_util.tree_map_with_path(of, params, is_leaf=is_weight)


def _weights(tree: Any) -> list[tuple[Any, Weight]]:
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_weight)
    return [(path, x) for path, x in found if is_weight(x)]


def _value_for(path: str, chosen: dict[str, str | None]) -> str | None:
    """Return the value of the option that applies to the weight at `path`, such as "int4".

    Return None if the option is not set, or if no option applies.
    """
    option = _option_of(path)
    return option and chosen[option]


def _option_of(path: str) -> str | None:
    """Return the name of the option that applies to the weight at `path`.

    Return None if the weight is never quantised.
    """
    names = set(path.split("."))
    if names & _HEADS:
        return "head_dtype"
    return None if names & _PLAIN else "quantization"


def _refuse(name: str, value: str, what: str) -> None:
    raise ValueError(
        f"{_WHERE}.{name}={value!r}: {what} is quantised already, as the checkpoint stores it; "
        "leave it out"
    )
