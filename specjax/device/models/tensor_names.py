"""Where checkpoints keep the tensors of a text model, and what they may hold besides.

The specs of all models begin their names with `model.` and `lm_head.`. Files of models with other
parts, and trainers of them, have longer names, and those of a model without its head shorter ones.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

# What precedes the tensors of the decoder, and of the output head. One of each counts: the first
# that occurs.
_ROOTS = (
    *("model.language_model.model.", "model.language_model.", "language_model.model."),
    *("language_model.", "model.text_model.", "text_model.", "model.", ""),
)
_HEADS = (
    "lm_head.",
    "language_model.lm_head.",
    "model.language_model.lm_head.",
    "text_model.lm_head.",
)
_DECODER = "embed_tokens.", "layers.", "norm."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Parts that do not matter for text, by the beginnings of their names, which may follow `model.`.
_OTHER_PARTS: Mapping[str, tuple[str, ...]] = {
    "vision": ("visual.", "vision_tower.", "vision_model.", "vision_encoder.", "image_newline"),
    "audio": ("audio_tower.",),
    "projector": ("multi_modal_projector.", "mm_projector.", "connector.", "patch_merger."),
    "value head": ("v_head.", "value_head.", "score."),
}
_ROTARY = "rotary_emb.inv_freq"  # buffers of old exports


@dataclass(frozen=True)
class TensorNames:
    """How a checkpoint calls what the specs call `model.*` and `lm_head.*`."""

    root: str
    head: str

    @classmethod
    def of(cls, names: Collection[str]) -> "TensorNames":
        """Return the beginnings that occur in `names`; by default those of the specs."""

        def is_there(root: str) -> bool:
            parts = tuple(root + part for part in _DECODER)
            return any(name.startswith(parts) for name in names)

        heads = (head for head in _HEADS if f"{head}weight" in names)
        return cls(next(filter(is_there, _ROOTS), "model."), next(heads, "lm_head."))

    def stored(self, name: str) -> str:
        """Return the checkpoint's name for a name of the specs."""
        if name.startswith("lm_head."):
            return self.head + name.removeprefix("lm_head.")
        is_decoder = name.startswith("model.")
        return self.root + name.removeprefix("model.") if is_decoder else name

    def canonical(self, name: str) -> str:
        """Return the specs' name for a name of the checkpoint; others are returned unchanged."""
        if name.startswith(self.head):
            return "lm_head." + name.removeprefix(self.head)
        rest = name.removeprefix(self.root)
        is_decoder = name.startswith(self.root) and rest.startswith(_DECODER)
        return f"model.{rest}" if is_decoder else name


def is_rotary(name: str) -> bool:
    """Return whether it is a buffer of rotary frequencies, which follow from the config."""
    return name.endswith(_ROTARY)


def is_head(name: str) -> bool:
    """Return whether it is the weight of an output head."""
    return name.endswith("weight") and name.removesuffix("weight") in _HEADS


def is_within(name: str, beginnings: Iterable[str]) -> bool:
    """Return whether a checkpoint's name begins like one of these names of the specs."""
    parts = [part.removeprefix("model.") for part in beginnings if part.startswith("model.")]
    others = [part for part in beginnings if not part.startswith("model.")]
    return name.startswith((*others, *(root + part for root in _ROOTS for part in parts)))


def other_part(name: str) -> str | None:
    """Return which part that does not matter for text a tensor belongs to; None for the text."""
    rest = name.removeprefix("model.")
    return next((part for part, names in _OTHER_PARTS.items() if rest.startswith(names)), None)


def as_groups(names: Iterable[str]) -> str:
    """Return names in words, those with the same beginning counted together."""
    counts = Counter(_group(name) for name in names)
    return ", ".join(f"{group} ({count})" for group, count in sorted(counts.items()))


def _group(name: str) -> str:
    parts = name.split(".")
    count = 1
    # Beginnings that say little, and the numbers of layers, belong to the group's name.
    while count < len(parts) - 1 and (parts[count - 1] in ("model", "layers", "language_model")):
        count += 1
    return ".".join(parts[:count]) + (".*" if count < len(parts) else "")
