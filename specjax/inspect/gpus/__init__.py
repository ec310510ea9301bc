"""The GPUs that steps can be compiled for where there is none: a .txtpb file each.

The file is XLA's description of a target (its proto `GpuTargetConfigProto`), so that a further GPU
is a further file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

GPUS = {file.stem: file for file in sorted(Path(__file__).parent.glob("*.txtpb"))}


@dataclass(frozen=True)
class GPU:
    """A GPU by its description."""

    name: str  # like "h200"
    target_config: str

    @classmethod
    def named(cls, name: str) -> "GPU":
        """The GPU of a name.

        Raises:
            ValueError: there is no file for it.
        """
        if name not in GPUS:
            raise ValueError(f"{name!r} is not a known target; choose one of {', '.join(GPUS)}")
        return cls(name, GPUS[name].read_text())

    @property
    def memory_bytes(self) -> int:
        """The device's memory, as nvidia-smi reports it."""
        return self._number("device_memory_size")

    @property
    def architecture(self) -> str:
        """What ptxas calls it, with the instructions of this architecture alone: "sm_90a"."""
        return f"sm_{self._number('major')}{self._number('minor')}a"

    def _number(self, field: str) -> int:
        found = re.search(rf"\b{field}: (\d+)", self.target_config)
        assert found, f"{self.name}.txtpb has no {field}"
        return int(found[1])
