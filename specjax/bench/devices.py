"""What benchmarks on several devices share: options of an `LLM`, and functions for replicas."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from specjax.checks import check_positive
from specjax.engine.engine import Engine
from specjax.host.speculation.policy import Policy

P = TypeVar("P", bound=Policy)


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The options of an `LLM` for several devices. The `LLM` class explains each option."""

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    collectives: str = "auto"

    def __post_init__(self):
        check_positive(
            **{
                "--tensor-parallel-size": self.tensor_parallel_size,
                "--data-parallel-size": self.data_parallel_size,
            }
        )

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Devices":
        """Read the options from a command's arguments."""
        return cls(**{one.name: getattr(args, one.name) for one in fields(cls)})

    @property
    def num_devices(self) -> int:
        """The number of devices of all replicas."""
        return self.tensor_parallel_size * self.data_parallel_size

    def describe(self, device: str) -> str:
        """Return the name `device`. For several devices, put their number and options before it."""
        if self.num_devices == 1:
            return device
        parts = [
            f"tensor parallel {self.tensor_parallel_size}",
            f"data parallel {self.data_parallel_size}",
            *(["expert parallel"] if self.enable_expert_parallel else []),
            f"collectives {self.collectives}",
        ]
        return f"{self.num_devices} devices ({', '.join(parts)}): {device}"


def set_policies(engine: Engine, make: Callable[[], P], *, show_progress: bool = False) -> list[P]:
    """Set a new policy, which chooses K, in each replica. Return the policies."""
    policies = [make() for _ in engine.engines]
    for replica, policy in zip(engine.engines, policies, strict=True):
        replica.set_policy(policy, show_progress=show_progress)
    return policies


def share_target(engine: Engine, source: Engine) -> None:
    """Let replica i of `engine` use the same arrays of target weights as replica i of `source`."""
    for replica, other in zip(engine.engines, source.engines, strict=True):
        replica.params = replica.params._replace(target=other.params.target)
