"""Reading the files of chain drafters: config, geometry of the one layer, name prefixes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles, open_checkpoint
from specjax.config import SpeculativeConfig
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.loading import load_params
from specjax.device.models import llama
from specjax.device.models.config_fields import refuse_quantised
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model
from specjax.device.models.registry import read_config
from specjax.device.placement import Placement

# Names of tensors in early EAGLE-3 exports.
LEGACY_NAMES = {
    f"fc_norm.{i}.weight": f"aux_norm_{level}.weight"
    for i, level in enumerate(("low", "mid", "high"))
}
# Tensors in checkpoints of EAGLE heads that are not loaded as weights: the integers of a draft
# vocabulary, and an embedding that is a copy of the target's.
PUBLISHED_BESIDE = "d2t", "t2d", "embed_tokens.weight"


@dataclass(frozen=True)
class DrafterFiles:
    """Tensors and config of a drafter; prefixes that re-exports add to names are ignored."""

    tensors: TensorFiles
    hf: HFConfig
    placement: Placement  # where the parameters go

    @property
    def prefix(self) -> str:
        """The prefix that a re-export added to names: "model." or nothing."""
        return "" if "fc.weight" in self.tensors.names() else "model."

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this published name."""
        return self.stored_name(name) in self.tensors.names()

    def stored_name(self, name: str) -> str:
        """Return the name in the files of a published name."""
        prefixed = self.prefix + name
        candidates = prefixed, name, LEGACY_NAMES.get(name, name)
        return next((c for c in candidates if c in self.tensors.names()), prefixed)

    def load(self, specs: Any, dtype: np.dtype, unused: tuple[str, ...] = ()) -> Any:
        """Load the parameters; tensors with published names in `unused` are not read."""
        ignored = {self.stored_name(name) for name in unused}
        return load_params(
            self.tensors,
            specs,
            dtype,
            placement=self.placement,
            rename=self.stored_name,
            ignore=ignored.__contains__,
        )

    def geometry(self, layer: str, target: Model) -> llama.Llama:
        """Return the geometry of the drafter's layer; optional tensors are found by name."""
        fields = self.hf.get("transformer_layer_config", self.hf.get("model", self.hf.fields))
        config = HFConfig({**fields, "model_type": "llama"}, self.hf.origin)
        shape = llama.from_hf(config)
        if shape.num_layers != 1:
            raise CheckpointError(
                f"{self.hf.origin}: num_hidden_layers={shape.num_layers}; drafters of one layer "
                "are supported"
            )
        if shape.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"{self.hf.origin}: vocab_size={shape.vocab_size}, the target's is "
                f"{target.vocab_size}; use a drafter trained for this target"
            )
        attention = f"{layer}.self_attn"
        return replace(
            shape,
            qkv_bias=self.has(f"{attention}.q_proj.bias"),
            out_bias=self.has(f"{attention}.o_proj.bias"),
            qk_norm=self.has(f"{attention}.q_norm.weight"),
        )


HeadLoad = Callable[[DrafterFiles, SpeculativeConfig, Model, np.dtype], tuple[Any, Any]]


def chain_loader(
    load_head: HeadLoad,
) -> Callable[
    [Path | None, SpeculativeConfig, Model, np.dtype, Placement], tuple[ChainDrafter, Any]
]:
    """Make the `Load` function of a chain drafter from one that reads its head."""

    def load(
        folder: Path | None,
        config: SpeculativeConfig,
        target: Model,
        dtype: np.dtype,
        placement: Placement,
    ) -> tuple[ChainDrafter, Any]:
        assert folder is not None, config.method
        hf = read_config(folder)
        refuse_quantised(hf)
        files = DrafterFiles(open_checkpoint(folder), hf, placement)
        head, params = load_head(files, config, target, dtype)
        return ChainDrafter(head, is_greedy=config.draft_sample_method == "greedy"), params

    return load


def embed_tokens(target: Model, params: Any, tokens: jax.Array) -> jax.Array:
    """Return embeddings [N, D] of tokens i32[N]: the drafter's own, or else the target's."""
    own = params.drafter.embedding
    return target.embed(params.target, tokens) if own is None else own[tokens]
