"""Locations of the demo checkpoints: beside the sources, or inside the installed package."""

from pathlib import Path

TARGET = "demo-llama"
# Drafter checkpoints of each demo target, by method; an MTP module is in the target's own folder.
DRAFTERS = {
    TARGET: {
        "eagle": "demo-llama-eagle1",
        "eagle3": "demo-llama-eagle3",
        "dflash": "demo-llama-dflash",
    },
    "demo-qwen3.5": {"mtp": "demo-qwen3.5"},
}

_PACKAGE = Path(__file__).resolve().parents[1]
_ROOTS = (_PACKAGE / "checkpoints", _PACKAGE.parent / "checkpoints")


def demo_folders() -> dict[str, Path]:
    """Return the folders of the available demo checkpoints, by name."""
    return {
        config.parent.name: config.parent
        for root in _ROOTS
        for config in sorted(root.glob("*/config.json"))
    }


def demo_folder(name: str) -> Path:
    """Return the folder of a demo checkpoint."""
    return demo_folders()[name]
