"""The settings of `specjax bench`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.bench.devices import Devices
from specjax.bench.measure import PLAIN, PLAIN_ONE, Configuration
from specjax.bench.workload import read_questions
from specjax.checks import check_seed
from specjax.config import SpeculativeConfig
from specjax.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Options of `specjax bench`.

    Args:
        drafters: the drafters to measure, as speculative configs without K. The keys are the
            names of the drafters in results.
    """

    model: str
    drafters: Mapping[str, Mapping[str, Any]]
    ks: tuple[int, ...]
    batch_size: int
    num_prompts: int
    max_tokens: int
    max_model_len: int
    temperature: float
    seed: int
    rounds: int
    dtype: str
    quantization: str | None = None
    devices: Devices = field(default_factory=Devices)

    def __post_init__(self):
        for name in "batch_size", "rounds", "num_prompts":
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} {getattr(self, name)} must be at least 1")
        if self.max_tokens < 2:
            raise ValueError(
                f"--max-tokens {self.max_tokens} leaves nothing to time: the first token comes "
                "with the prompt; use at least 2"
            )
        if not self.drafters:
            raise ValueError(
                f"--model {self.model} has no default drafters; name one with "
                "--drafter METHOD=CHECKPOINT"
            )
        if not self.ks or min(self.ks) < 0:
            given = ",".join(map(str, self.ks))
            raise ValueError(f"--k {given} must list integers of at least 0, like 1,2,3")
        if not any(self.ks):
            raise ValueError("--k 0 alone drafts nothing; also list a K of at least 1")
        available = len(read_questions())
        if self.num_prompts > available:
            raise ValueError(f"--num-prompts {self.num_prompts}: there are {available}")
        if self.num_prompts % self.num_together:
            times = self.devices.data_parallel_size
            replicas = f" on each of {times} replicas" if times > 1 else ""
            raise ValueError(
                f"--num-prompts {self.num_prompts} does not fill batches of --batch-size "
                f"{self.batch_size}{replicas}; use a multiple of {self.num_together}"
            )
        check_seed(**{"--seed": self.seed})
        SamplingParams(temperature=self.temperature)

    @property
    def num_together(self) -> int:
        """The number of prompts that all replicas decode together."""
        return self.batch_size * self.devices.data_parallel_size

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """All configurations, plain decoding first."""
        return tuple(one for method in (PLAIN, *self.drafters) for one in self.of_method(method))

    def of_method(self, method: str) -> tuple[Configuration, ...]:
        """Return the configurations of a drafting method, or of PLAIN."""
        if method == PLAIN:
            return (PLAIN_ONE,)
        return tuple(Configuration(method, k) for k in self.ks)

    def describe(self, method: str) -> str:
        """Return a drafting method's name with all Ks, or the name of plain decoding."""
        if method == PLAIN:
            return "plain decoding"
        return f"{method}, K = {', '.join(map(str, self.ks))}"

    def speculation(self, method: str) -> SpeculativeConfig | None:
        """Return the speculative config of a drafting method's engine; None for plain decoding.

        Raises:
            ValueError: the method is unknown, or does not fit the checkpoint or a K.
        """
        if method == PLAIN:
            return None
        # Each K is measured separately. The table makes the engine compile the rounds of all Ks.
        table = [(size, size, k) for size, k in enumerate(self.ks, start=1)]
        sizes = {
            "num_speculative_tokens": max(self.ks),
            "num_speculative_tokens_per_batch_size": table,
        }
        return SpeculativeConfig.of({**self.drafters[method], **sizes})
