"""Which implementation of an operation runs: one place, one rule."""

from collections.abc import Callable, Mapping

KERNELS = ("auto", "reference", "triton", "mosaic")


def select(op: str, kernels: str, implementations: Mapping[str, Callable]) -> Callable:
    """The implementation of `op` that `kernels` names; "auto" takes the first one listed.

    Raises:
        ValueError: `kernels` is unknown, or `op` has no such implementation.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is unknown; choose one of {', '.join(KERNELS)}")
    if kernels == "auto":
        return next(iter(implementations.values()))
    if kernels not in implementations:
        raise ValueError(
            f"kernels={kernels!r}: {op} has no such implementation; "
            f"it has {', '.join(implementations)}, or use kernels='auto'"
        )
    return implementations[kernels]
