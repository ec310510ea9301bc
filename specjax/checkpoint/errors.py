"""The error for unusable checkpoint files."""

from pathlib import Path


class CheckpointError(ValueError):
    """Raised if a checkpoint is missing, damaged, or of the wrong kind."""


def damaged(path: Path, reason: str) -> CheckpointError:
    """Return the error for a file that violates its format."""
    return CheckpointError(f"{path} is damaged: {reason}; download or export the file again")
