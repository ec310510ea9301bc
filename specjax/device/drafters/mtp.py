"""Multi-token prediction (MTP): drafting with an additional layer in the target's checkpoint.

    u = fc [norm_e(e(x_{p+1})); norm_h(h_p)]
    h' = norm(Layer(u))
    logits = head h'

h_p is the target's hidden state at position p, after the target's final norm. fc is a matrix. The
embedding e and the output head are the target's. The layer is like the target's attention layers,
and has a separate KV cache.

For each further draft, the layer runs again and reads h' instead of h, unless the target has
several modules (see `mtp_modules`). The form of the layer and the names of its tensors depend on
the target's family (see `NAMES`). Sources: DeepSeek-V3, section 2.2; Qwen3-Next.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import rms_norm
from specjax.device.cache.kind import CacheKind
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Params
from specjax.device.drafters.head import ShapedHead
from specjax.device.models.decoder import decoder_layer
from specjax.device.models.deepseek_v3 import DeepSeek
from specjax.device.models.glm4_moe import Glm4Moe
from specjax.device.models.layers.residual import Residual
from specjax.device.models.layers.rows import Rows
from specjax.device.models.model import Features, Model
from specjax.device.models.qwen3_5 import Qwen35
from specjax.device.models.tensor_names import EMBEDDING, HEAD
from specjax.device.weights.matrix import Matrix, dense


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MTPParams:
    """Weights of an MTP module."""

    embedding_norm: jax.Array  # [D]
    hidden_norm: jax.Array  # [D]
    fc: Matrix  # [2 D, D]
    layer: Any  # a layer of the target's family
    norm: jax.Array  # [D]


class ModuleNames(NamedTuple):
    """Names of an MTP module's tensors in one family of targets, without the module's prefix."""

    prefix: Callable[[Any, int], str]  # returns the prefix, given a target and a module's number
    embedding_norm: str
    hidden_norm: str
    fc: str
    norm: str
    layer: str  # "" if the layer's tensors follow the prefix directly
    num_field: str  # config field with the number of modules, or of layers in the only module
    has_several: bool = False  # whether `num_field` counts modules
    copies: Mapping[str, str] = {}  # module tensor -> the target's tensor that it copies


_AS_LAYERS = ModuleNames(
    prefix=lambda shape, number: shape.ignored_prefixes[number],
    embedding_norm="enorm",
    hidden_norm="hnorm",
    fc="eh_proj",
    norm="shared_head.norm",
    layer="",
    num_field="num_nextn_predict_layers",
    has_several=True,
    copies={"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD},
)
# The names by the target's class.
NAMES: dict[type, ModuleNames] = {
    Qwen35: ModuleNames(
        prefix=lambda shape, number: "mtp.",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        fc="fc",
        norm="norm",
        layer="layers.0",
        num_field="mtp_num_hidden_layers",
    ),
    DeepSeek: _AS_LAYERS,
    Glm4Moe: _AS_LAYERS,
}


@dataclass(frozen=True)
class MTPHead(ShapedHead):
    """An MTP module as the head of a chain drafter. `shape` is the target model."""

    number: int = 0  # index of the module in the target
    has_embedding: bool = False
    aux_layers: tuple[int, ...] = ()

    @property
    def names(self) -> ModuleNames:
        """The names of a module's tensors in the target's family."""
        return NAMES[type(self.shape)]

    @property
    def prefix_in_target(self) -> str:
        """See `DrafterWeights.prefix_in_target`."""
        return self.names.prefix(self.shape, self.number)

    @property
    def copies(self) -> Mapping[str, str]:
        """Names of module tensors that should equal a tensor of the target.

        Each name is mapped to the name of the target's tensor, which is used instead.
        """
        prefix = self.prefix_in_target
        return {f"{prefix}{name}": own for name, own in self.names.copies.items()}

    def drafter(self, is_greedy: bool) -> ChainDrafter:
        """Return the drafter that runs the module."""
        return ChainDrafter(self, is_greedy)

    @property
    def hidden_size(self) -> int:
        """The width of the features: the target's hidden size."""
        return self.shape.hidden_size

    @property
    def cache_kind(self) -> CacheKind:
        """The cache kind of a single attention layer with the target's shape."""
        return replace(self.shape.attention, num_layers=1)

    def specs(self, names: Collection[str] = ()) -> MTPParams:
        """Return the weights as `TensorSpec`s.

        `names` are the checkpoint's tensor names. They determine the layout of experts.
        """
        shape, called, prefix = self.shape, self.names, self.prefix_in_target
        dim = shape.hidden_size
        layer = f"{prefix}{called.layer}".removesuffix(".")
        return MTPParams(
            embedding_norm=shape.norm_spec(f"{prefix}{called.embedding_norm}"),
            hidden_norm=shape.norm_spec(f"{prefix}{called.hidden_norm}"),
            fc=dense([f"{prefix}{called.fc}.weight"], 2 * dim, [dim]),
            layer=shape.layer_specs(layer, names, is_sparse=shape.experts is not None),
            norm=shape.norm_spec(f"{prefix}{called.norm}"),
        )

    def is_unused(self, name: str) -> bool:
        """Return whether the tensor `name` belongs to the target or is a copy of a target tensor.

        See `DrafterWeights.is_unused`.
        """
        return not name.startswith(self.prefix_in_target) or name in self.copies

    def fuse(self, params: MTPParams, features: Features) -> jax.Array:
        """Return the target's final hidden state, unchanged."""
        return features.hidden

    def extend(
        self,
        target: Model,
        params: Params,
        tokens: jax.Array,
        hidden: jax.Array,
        rows: Rows,
        kv: Any,
    ) -> tuple[jax.Array, Any]:
        """See `Head.extend`."""
        embedded = target.embed(params.target, tokens)
        return _layer(params.drafter, embedded, hidden, rows, kv, self)

    def logits(self, target: Model, params: Params, hidden: jax.Array) -> jax.Array:
        """Return the target's logits f32[N, V] for `hidden` [N, D], which is already normed."""
        return target.logits(params.target, hidden)

    def target_ids(self, params: MTPParams) -> None:
        """Return None: drafts use the target's full vocabulary."""


@partial(jax.jit, static_argnames="head")
def _layer(
    params: MTPParams, embedded: jax.Array, hidden: jax.Array, rows: Rows, kv: Any, head: MTPHead
) -> tuple[jax.Array, Any]:
    shape = head.shape
    eps, is_centred = shape.rms_norm_eps, shape.has_centred_norms
    normed = (
        rms_norm(embedded, params.embedding_norm, eps, is_centred),
        rms_norm(hidden, params.hidden_norm, eps, is_centred),
    )
    x = params.fc.multiply(jnp.concatenate(normed, axis=-1))
    angles = shape.rope.angles(rows.positions)
    stream = Residual(x, jnp.zeros_like(x))
    where = rows, angles, kv, jnp.int32(0), shape, head.cache_kind
    stream, kv = decoder_layer(params.layer, stream, *where)
    return stream.normed(params.norm, shape, rows.kernels)[1], kv
