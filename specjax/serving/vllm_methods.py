"""Methods of vLLM's engines: those that have nothing to do with requests, and errors for others."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from specjax.vllm_names import METHODS, PAGE


class Refusing:
    """An engine whose errors say what it has in place of a method or attribute of vLLM's."""

    if not TYPE_CHECKING:  # a checker of types would take every name

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in METHODS:
                raise AttributeError(f"{text}: {METHODS[name]}; see {PAGE}")
            raise AttributeError(text)


class VllmMethods(Refusing):
    """What vLLM's `LLM` has besides requests, weights and caches."""

    def start_profile(self, profile_prefix: str = "specjax-profile") -> None:
        """Record what device and host do until `stop_profile`, into a folder, with jax.profiler.

        Raises:
            OSError: the folder cannot be made.
        """
        Path(profile_prefix).mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(profile_prefix)

    def stop_profile(self) -> None:
        """Write what was recorded; TensorBoard and Perfetto read it."""
        jax.profiler.stop_trace()
