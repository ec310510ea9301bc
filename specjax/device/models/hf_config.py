"""Reads a Hugging Face `config.json`. Error messages name the field, the value and a remedy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specjax.checkpoint.errors import CheckpointError
from specjax.checks import is_number
from specjax.device.models.layers.rope import Rope, yarn_magnitude

_ROPE_KINDS = "default", "linear", "llama3", "yarn"
# Layers, experts and heads of drafters are listed one by one, so a mistyped number could take hours
# or all memory. The supported models have at most 126 layers and 512 experts.
_LISTED = frozenset(
    (
        *("num_hidden_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers"),
        *("num_mtp_layers", "num_experts", "num_local_experts", "n_routed_experts"),
        *("num_heads", "medusa_num_heads", "medusa_num_layers"),
    )
)
_MAX_LISTED = 4096


@dataclass(frozen=True)
class HFConfig:
    """The fields of a config, and their origin for error messages."""

    fields: Mapping[str, Any]
    origin: str

    def get(self, key: str, default: Any) -> Any:
        """Return the value of the field `key`, or `default` if the field is absent or null."""
        value = self.fields.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the field as a positive integer; fields in `_LISTED` are at most `_MAX_LISTED`."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{self.origin}: {key} must be a positive integer, got {value!r}")
        if key in _LISTED and value > _MAX_LISTED:
            raise CheckpointError(
                f"{self.origin}: {key}={value} must be at most {_MAX_LISTED}; correct the field"
            )
        return value

    def count(self, key: str, default: int) -> int:
        """Return the field, which must be an integer of at least 0."""
        return 0 if self.get(key, default) == 0 else self.integer(key, default)

    def number(self, key: str, default: float) -> float:
        """Return the field as a positive number."""
        return _positive(self.get(key, default), f"{self.origin}: {key}")

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the field as a bool."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.origin}: {key} must be true or false, got {value!r}")
        return value

    def nested(self, key: str) -> dict[str, Any]:
        """Return the field, which must be an object, as a dict; {} if it is absent or null."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.origin}: {key} must be an object, got {value!r}")
        return dict(value)

    def kv_heads(self, num_heads: int, default: int | None) -> int:
        """Return the number of key-value heads, which must divide `num_heads`."""
        value = self.integer("num_key_value_heads", default)
        if num_heads % value:
            raise CheckpointError(
                f"{self.origin}: num_key_value_heads={value} must divide "
                f"num_attention_heads={num_heads}"
            )
        return value

    def require(self, key: str, expected: Any) -> None:
        """Raise `CheckpointError` if the field is set and its value is not `expected`."""
        value = self.get(key, expected)
        if value != expected:
            raise CheckpointError(
                f"{self.origin}: {key}={value!r} is not supported; this model needs {expected!r}"
            )

    def require_unset(self, *keys: str) -> None:
        """Raise `CheckpointError` if one of the unsupported fields `keys` is switched on."""
        for key in keys:
            if self.fields.get(key):
                raise CheckpointError(
                    f"{self.origin}: {key}={self.fields[key]!r} is not supported; "
                    f"use a checkpoint without {key}"
                )

    def rope(self, head_dim: int, partial_factor: float | None = None) -> Rope:
        """Read the rotary embedding for heads of width `head_dim`; see `rope_fields`.

        `partial_factor` is the fraction of each head that is rotated by default. It is None for
        models that always rotate whole heads.
        """
        fields = self.rope_fields()
        kind, theta = fields["rope_type"], fields["rope_theta"]
        if kind not in _ROPE_KINDS:
            raise CheckpointError(
                f"{self.origin}: rope_scaling {kind!r} is not supported; "
                f"supported: {', '.join(_ROPE_KINDS)}"
            )
        plain = Rope(
            head_dim=self._rotated_dim(fields, head_dim, partial_factor),
            theta=_positive(theta, f"{self.origin}: rope_theta"),
        )
        if kind == "default":
            return plain

        def scale(name: str, default: float | None = None) -> float:
            value = default if fields.get(name) is None else fields[name]
            if value is None:
                raise CheckpointError(f"{self.origin}: rope_scaling {kind!r} needs {name!r}")
            return _positive(value, f"{self.origin}: rope_scaling {kind!r}: {name}")

        scaled = replace(plain, scaling=kind, factor=scale("factor"))
        if kind == "linear":
            return scaled
        length = self._original(fields, self.integer("max_position_embeddings", 2048))
        scaled = replace(scaled, original_max_position=int(length))
        if kind == "llama3":
            low, high = scale("low_freq_factor"), scale("high_freq_factor")
            if high <= low:
                raise CheckpointError(
                    f"{self.origin}: rope_scaling 'llama3': high_freq_factor={high} must be above "
                    f"low_freq_factor={low}; correct the fields"
                )
            return replace(scaled, low_freq_factor=low, high_freq_factor=high)
        # As in transformers: the quotient of two corrections, if both weights are set.
        attention_factor = yarn_magnitude(scaled.factor)
        if fields.get("mscale") and fields.get("mscale_all_dim"):
            above, below = scale("mscale"), scale("mscale_all_dim")
            attention_factor = yarn_magnitude(scaled.factor, above)
            attention_factor /= yarn_magnitude(scaled.factor, below)
        return replace(
            scaled,
            beta_fast=scale("beta_fast", 32.0),
            beta_slow=scale("beta_slow", 1.0),
            truncates=fields.get("truncate", True) is True,
            attention_factor=scale("attention_factor", attention_factor),
        )

    def max_position(self, default: int) -> int:
        """Return the number of positions that the model was trained for.

        `max_position_embeddings` counts them before or after the scaling of the rotary embedding.
        So the result depends on the kind of scaling:

            yarn      the original length times the factor
            linear    `max_position_embeddings` times the factor
            others    `max_position_embeddings`

        The result is never less than `max_position_embeddings`.
        """
        length, fields = self.integer("max_position_embeddings", default), self.rope_fields()
        kind = fields["rope_type"]
        if kind not in ("linear", "yarn") or fields.get("factor") is None:
            return length
        original = self._original(fields, length) if kind == "yarn" else length
        factor = _positive(fields["factor"], f"{self.origin}: rope_scaling {kind!r}: factor")
        return max(length, int(original * factor))

    def _original(self, fields: Mapping[str, Any], default: int) -> float:
        """Return `original_max_position_embeddings`, the length before scaling.

        This is a field of the config, or else one of the rotary embedding's `fields`. Return
        `default` if both lack the field.
        """
        name = "original_max_position_embeddings"
        given = fields.get(name)
        value = self.get(name, default if given is None else given)
        return _positive(value, f"{self.origin}: rope_scaling: {name}")

    def rope_fields(self) -> Mapping[str, Any]:
        """Return the fields of the rotary embedding, with at least `rope_type` and `rope_theta`.

        As in transformers, they are the fields of `rope_scaling` if the config has it, else those
        of `rope_parameters`. If the config has both, only `rope_theta` and `partial_rotary_factor`
        can come from `rope_parameters`: each is used if neither `rope_scaling` nor the config's top
        level has it.

        Raises:
            CheckpointError: there are different fields for several kinds of layers.
        """
        fields, scaling = self.nested("rope_parameters"), self.nested("rope_scaling")
        both = fields | scaling
        if nested := [name for name, value in both.items() if isinstance(value, Mapping)]:
            raise CheckpointError(
                f"{self.origin}: rope_parameters for each kind of layer ({', '.join(nested)}) are "
                "not supported; use a checkpoint with one rotary embedding for all layers"
            )
        if scaling:
            names = [n for n in ("rope_theta", "partial_rotary_factor") if n in fields]
            kept = {name: fields[name] for name in names if self.get(name, None) is None}
            fields = kept | scaling
        kind = fields.get("rope_type", fields.get("type", "default"))
        return {"rope_theta": self.get("rope_theta", 10000.0)} | fields | {"rope_type": kind}

    def _rotated_dim(
        self, fields: Mapping[str, Any], head_dim: int, partial_factor: float | None
    ) -> int:
        default = self.get("partial_rotary_factor", partial_factor or 1.0)
        part = fields.get("partial_rotary_factor", default)
        rotated = int(head_dim * part) if is_number(part) and 0 < part <= 1 else 0
        if not rotated or rotated % 2:
            raise CheckpointError(
                f"{self.origin}: partial_rotary_factor={part!r} must be a number in (0, 1] that "
                f"selects an even number of the {head_dim} dimensions of a head"
            )
        if partial_factor is None and rotated != head_dim:
            raise CheckpointError(
                f"{self.origin}: partial_rotary_factor={part!r} is not supported for this "
                "model_type, which rotates whole heads"
            )
        return rotated


def _positive(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"{where} must be a positive number, got {value!r}")
    return float(value)
