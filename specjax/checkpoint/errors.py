"""The error of bad checkpoint files."""

from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or not what it is used as. Raised before any work."""


def damaged(path: Path, reason: str) -> CheckpointError:
    """The error for a file whose bytes are not what its format asks for."""
    return CheckpointError(f"{path} is damaged: {reason}; download or export the file again")
