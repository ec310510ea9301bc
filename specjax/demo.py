"""Where the demo checkpoints lie: beside the sources, or inside the installed package."""

from pathlib import Path

from specjax.checkpoint.errors import CheckpointError

TARGET = "demo-llama"
# Of each demo target, the drafters by method; a module of the target's own lies in its folder.
DRAFTERS = {
    TARGET: {"eagle": "demo-llama-eagle1", "eagle3": "demo-llama-eagle3"},
    "demo-qwen3.5": {"mtp": "demo-qwen3.5"},
}

_PACKAGE = Path(__file__).resolve().parent
_ROOTS = (_PACKAGE / "checkpoints", _PACKAGE.parent / "checkpoints")


def demo_folder(name: str) -> Path:
    """The folder of a demo checkpoint. Raises CheckpointError, naming those that exist."""
    demos = {
        config.parent.name: config.parent
        for root in _ROOTS
        for config in sorted(root.glob("*/config.json"))
    }
    if name not in demos:
        raise CheckpointError(
            f"{name!r} is neither a folder nor a demo checkpoint; demo checkpoints here: "
            f"{', '.join(demos) or 'none'}; else pass a folder, or a hub id like org/name"
        )
    return demos[name]


def locate(checkpoint: str) -> str | Path:
    """A folder or a hub id as it is, or the folder of the demo checkpoint of this name."""
    if "/" in checkpoint or Path(checkpoint).expanduser().is_dir():
        return checkpoint
    return demo_folder(checkpoint)
