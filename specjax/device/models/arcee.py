"""Arcee's AFM (`arcee`): a Llama whose feed-forward layers have a squared ReLU and no gate."""

from dataclasses import replace

from specjax.device.models import llama
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.layers.mlp import SquaredReLU
from specjax.device.models.llama import Llama


def from_hf(hf: HFConfig) -> Llama:
    """Return the model that a Hugging Face config of type `arcee` describes."""
    hf.require("hidden_act", "relu2")
    plain = HFConfig({**hf.fields, "hidden_act": "silu"}, hf.origin)
    return replace(llama.from_hf(plain), activation=SquaredReLU())
