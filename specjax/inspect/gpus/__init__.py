"""The GPUs for which steps can be compiled on a machine without a GPU.

Each GPU has one .txtpb file: XLA's description of the GPU, as text of the protobuf message
`GpuTargetConfigProto`. To support another GPU, add its file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

GPUS = {file.stem: file for file in sorted(Path(__file__).parent.glob("*.txtpb"))}


@dataclass(frozen=True)
class GPU:
    """A GPU's name and XLA's description of this GPU."""

    name: str  # like "h200"
    target_config: str  # the text of the GPU's .txtpb file

    @classmethod
    def named(cls, name: str) -> "GPU":
        """Return the GPU with this name.

        Raises:
            ValueError: there is no file with this name.
        """
        if name not in GPUS:
            raise ValueError(f"{name!r} is not a known target; choose one of {', '.join(GPUS)}")
        return cls(name, GPUS[name].read_text())

    @property
    def memory_bytes(self) -> int:
        """The device's memory, as reported by nvidia-smi."""
        return self._number("device_memory_size")

    @property
    def architecture(self) -> str:
        """The architecture for ptxas, like "sm_90a".

        The "a" permits instructions that only this architecture has.
        """
        return f"sm_{self._number('major')}{self._number('minor')}a"

    def _number(self, field: str) -> int:
        found = re.search(rf"\b{field}: (\d+)", self.target_config)
        assert found, f"{self.name}.txtpb has no {field}"
        return int(found[1])
