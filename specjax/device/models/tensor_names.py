"""Translates tensor names between checkpoints and the `TensorSpec`s of text models.

The names in the `TensorSpec`s of all models begin with `model.` or `lm_head.`. Checkpoints and
trainers of multimodal models use longer names. Checkpoints of models without an output head use
shorter names. Checkpoints can also contain tensors that are not part of the text model.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

# Prefixes of the decoder's tensors and of the output head. The first prefix that occurs is used.
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
# The name prefixes of parts that the text model does not use. `model.` may precede a prefix.
_OTHER_PARTS: Mapping[str, tuple[str, ...]] = {
    "vision": ("visual.", "vision_tower.", "vision_model.", "vision_encoder.", "image_newline"),
    "audio": ("audio_tower.",),
    "projector": ("multi_modal_projector.", "mm_projector.", "connector.", "patch_merger."),
    "value head": ("v_head.", "value_head.", "score."),
}
_ROTARY = "rotary_emb.inv_freq"  # buffers of old exports


@dataclass(frozen=True)
class TensorNames:
    """The prefixes of tensor names in a checkpoint.

    In a model's `TensorSpec`s, names begin with `model.` or `lm_head.`. In the checkpoint, they
    begin with `root` instead of `model.`, and with `head` instead of `lm_head.`.
    """

    root: str
    head: str

    @classmethod
    def of(cls, names: Collection[str]) -> "TensorNames":
        """Return the prefixes that occur in `names`. The defaults are `model.` and `lm_head.`."""

        def is_there(root: str) -> bool:
            parts = tuple(root + part for part in _DECODER)
            return any(name.startswith(parts) for name in names)

        heads = (head for head in _HEADS if f"{head}weight" in names)
        return cls(next(filter(is_there, _ROOTS), "model."), next(heads, "lm_head."))

    def stored(self, name: str) -> str:
        """Return the checkpoint's name of a tensor, given its name in the model's `TensorSpec`s."""
        if name.startswith("lm_head."):
            return self.head + name.removeprefix("lm_head.")
        is_decoder = name.startswith("model.")
        return self.root + name.removeprefix("model.") if is_decoder else name

    def canonical(self, name: str) -> str:
        """Return a tensor's name in the model's `TensorSpec`s, given the checkpoint's name.

        A name that is not part of the model is returned unchanged.
        """
        if name.startswith(self.head):
            return "lm_head." + name.removeprefix(self.head)
        rest = name.removeprefix(self.root)
        is_decoder = name.startswith(self.root) and rest.startswith(_DECODER)
        return f"model.{rest}" if is_decoder else name


def is_rotary(name: str) -> bool:
    """Return whether the tensor `name` holds rotary frequencies, which follow from the config."""
    return name.endswith(_ROTARY)


def is_head(name: str) -> bool:
    """Return whether the tensor `name` is the weight of an output head."""
    return name.endswith("weight") and name.removesuffix("weight") in _HEADS


def is_within(name: str, beginnings: Iterable[str]) -> bool:
    """Return whether the checkpoint's tensor `name` begins with one of the prefixes `beginnings`.

    `beginnings` are prefixes of names in the model's `TensorSpec`s. In the checkpoint, another
    prefix can replace `model.`.
    """
    parts = [part.removeprefix("model.") for part in beginnings if part.startswith("model.")]
    others = [part for part in beginnings if not part.startswith("model.")]
    return name.startswith((*others, *(root + part for root in _ROOTS for part in parts)))


def other_part(name: str) -> str | None:
    """Return the part of a multimodal checkpoint to which the tensor `name` belongs, like "vision".

    None if the tensor belongs to the text model, or to a part that is not known.
    """
    rest = name.removeprefix("model.")
    return next((part for part, names in _OTHER_PARTS.items() if rest.startswith(names)), None)


def as_groups(names: Iterable[str]) -> str:
    """Return a text that lists `names` by common prefix, with the number of names per prefix."""
    counts = Counter(_group(name) for name in names)
    return ", ".join(f"{group} ({count})" for group, count in sorted(counts.items()))


def _group(name: str) -> str:
    parts = name.split(".")
    count = 1
    # A group's name includes common prefixes and the number of the layer.
    while count < len(parts) - 1 and (parts[count - 1] in ("model", "layers", "language_model")):
        count += 1
    return ".".join(parts[:count]) + (".*" if count < len(parts) else "")
