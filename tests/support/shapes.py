"""Checks the shapes and dtypes of the arguments and results of a step's functions."""

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
    """Check the step's functions from now on. The checks run only while functions are traced."""
    for name in FUNCTIONS:
        setattr(programs, name, checked(getattr(programs, name)))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a check that arguments and results match their type hints.

    A dimension letter must mean the same number in all arguments and results. Letters in a state
    have a separate meaning, because its B is the number of slots, not a batch.
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
    """Call `check`. For a state, dimension letters have a separate meaning."""
    with jaxtyped("context") if isinstance(value, EngineState) else nullcontext():
        check(value, where)


def check(value: Any, where: str) -> None:
    """Raise a TypeError if any array in a container, at any depth, does not match its type hint."""
    kind = type(value)
    if not kind.__module__.startswith("specjax.device") or not jax.tree.leaves(value):
        return
    for name, hint in get_type_hints(kind).items():
        field = getattr(value, name, None)
        if isinstance(field, jax.Array) and not is_bearable(field, hint):
            raise TypeError(f"{where}.{name} is {jax.typeof(field)}, which is not {hint}")
        check(field, f"{where}.{name}")
