"""The error for bad checkpoint files."""

from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of the wrong kind. Raised before any work."""


def damaged(path: Path, reason: str) -> CheckpointError:
    """Return the error for a file that violates its format."""
    return CheckpointError(f"{path} is damaged: {reason}; download or export the file again")
