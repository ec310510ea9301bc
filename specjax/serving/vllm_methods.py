"""Methods of vLLM's engines that do not concern requests, and errors for missing methods."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from specjax.vllm_names import METHODS, PAGE


class Refusing:
    """Base class of LLMs. The error for a method that only vLLM has explains why it is missing."""

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in METHODS:
                raise AttributeError(f"{text}: {METHODS[name]}; see {PAGE}")
            raise AttributeError(text)


class VllmMethods(Refusing):
    """Methods of vLLM's `LLM` that do not concern requests, weights or caches."""

    def start_profile(self, profile_prefix: str = "specjax-profile") -> None:
        """Record device and host activity with jax.profiler into a folder, until `stop_profile`.

        Raises:
            OSError: the folder cannot be made.
        """
        Path(profile_prefix).mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(profile_prefix)

    def stop_profile(self) -> None:
        """Write the recorded profile, which TensorBoard and Perfetto can read."""
        jax.profiler.stop_trace()
