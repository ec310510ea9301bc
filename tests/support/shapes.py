"""Shapes and dtypes of all that enters and leaves the functions of a step, checked as traced."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, get_type_hints

import jax
from beartype.door import is_bearable
from jaxtyping import jaxtyped

from specjax.device.state import EngineState
from specjax.engine import programs

FUNCTIONS = (
    "admit",
    "restore",
    "take",
    "prefill",
    "begin",
    "decode_step",
    "propose",
    "extend",
    "settle",
    "observe_deferred",
)


def check_boundary() -> None:
    """From now on programs are checked while they are traced, which costs nothing afterwards."""
    for name in FUNCTIONS:
        setattr(programs, name, checked(getattr(programs, name)))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose arguments and results must be as their types declare.

    A letter means one number in all of them. The state comes by itself: its requests are all slots.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jaxtyped("context"):
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                check_alone(value, f"{function.__name__}: {name}")
            result = function(*args, **kwargs)
            for value in result if type(result) is tuple else (result,):
                check_alone(value, f"{function.__name__}: {type(value).__name__}")
            return result

    return call


def check_alone(value: Any, where: str) -> None:
    """`check`; a state in letters of its own."""
    with jaxtyped("context") if isinstance(value, EngineState) else nullcontext():
        check(value, where)


def check(value: Any, where: str) -> None:
    """Refuse a container of arrays with a field that is not as its type says, at any depth."""
    kind = type(value)
    if not kind.__module__.startswith("specjax.device") or not jax.tree.leaves(value):
        return
    for name, hint in get_type_hints(kind).items():
        field = getattr(value, name, None)
        if isinstance(field, jax.Array) and not is_bearable(field, hint):
            raise TypeError(f"{where}.{name} is {jax.typeof(field)}, which is not {hint}")
        check(field, f"{where}.{name}")
