"""Functions that quantise matrices in the formats of checkpoints.

Each function uses the tool of the format if possible, or else follows the format's specification. A
writer is a function that takes a weight [O, I]. It returns the tensors that store the weight, by
the endings of their names, and the weight in float32 that these tensors represent. It returns None
if the weight's shape does not suit the format.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.checkpoints import Checkpoints
from support.weights import rewrite

QUANTISED = re.compile(r"(layers.*(_proj|_qkvz|_qkv|_z)|mtp.fc|lm_head)\.weight$")
AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7  # the outputs that a word holds, from its lowest bits
Written = tuple[dict[str, Any], torch.Tensor] | None


@dataclass(frozen=True)
class Form:
    """A format with certain settings.

    Attributes:
        config: the `quantization_config`.
        write: the writer; see the module's docstring.
    """

    config: dict[str, Any]
    write: Callable[[torch.Tensor], Written]


def by_compressed_tensors(weight: torch.Tensor, args: dict[str, Any], name: str) -> Any:
    """Quantise a matrix with compressed-tensors, which also chooses scales and zero points."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    size = args.get("group_size")
    if size and weight.shape[1] % size:
        return None
    own = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=own)
    groups = weight.view(len(weight), -1, size or weight.shape[1])
    if args["strategy"] == "tensor":
        groups = weight.view(1, -1)
    bounds, state = (groups.amin(-1), groups.amax(-1)), {}
    if args["strategy"] == "tensor_group":
        state["weight_global_scale"] = generate_gparam(
            *(x.amax().view(1) for x in (-weight, weight))
        )
    scale, zero = calculate_qparams(*bounds, own, state.get("weight_global_scale"))
    if args["strategy"] == "tensor":
        scale, zero = scale.view(1), zero.view(1)
    state |= {"weight": weight, "weight_scale": scale}
    if not args["symmetric"]:
        state["weight_zero_point"] = zero.to(torch.int8)
    tool = BaseCompressor.get_value_from_registry(name)
    stored = tool.compress(state, scheme)
    return stored, tool.decompress(stored, scheme)["weight"].float()


def as_modelopt(weight: torch.Tensor) -> Written:
    """Return random NVFP4 numbers with ModelOpt's names, unpacked by compressed-tensors."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    (num_out, num_in), rng = weight.shape, np.random.default_rng(0)
    if num_in % 16:
        return None
    codes = torch.tensor(rng.integers(0, 256, (num_out, num_in // 2)).astype(np.uint8))
    numbers = unpack_fp4_from_uint8(codes, num_out, num_in, dtype=torch.float32)
    scales = torch.tensor(rng.uniform(1, 300, (num_out, num_in // 16))).to(torch.float8_e4m3fn)
    scales[0, 0] = 0  # as for a group whose numbers are all small
    factor = torch.tensor(4e-4)
    meant = numbers * scales.float().repeat_interleave(16, 1) * factor
    named = {"weight_scale_2": factor, "input_scale": torch.tensor(1.0)}
    return {"weight": codes, "weight_scale": scales, **named}, meant


def as_fp8(weight: torch.Tensor, block: int) -> Written:
    """Return float8 numbers with a scale per square block. The last blocks may be smaller."""
    rows, columns = (torch.arange(n) // block for n in weight.shape)
    stored = (8 * weight).to(torch.float8_e4m3fn)
    counts = int(rows[-1]) + 1, int(columns[-1]) + 1
    scales = torch.linspace(0.1, 0.2, counts[0] * counts[1]).view(counts)
    named = {"weight": stored, "weight_scale_inv": scales}
    return named, stored.float() * scales[rows[:, None], columns]


def compressed(name: str, **args: Any) -> Form:
    args = {"num_bits": 4, "type": "int", "symmetric": True, **args}
    # Groups may name modules in any way: the tensors tell what is quantised.
    groups = {"group_0": {"targets": ["Linear", r"re:.*mlp.*"], "weights": args}}
    config = {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}
    config["ignore"] = ["lm_head", r"re:.*self_attn\.k_proj$"]
    return Form(config, partial(by_compressed_tensors, args=args, name=name))


def packed_words(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight 4-bit numbers into each i32 word, along the last axis.

    Number order[i] of a word is in bits 4 i to 4 i + 3.
    """
    words = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, which in enumerate(order):
            words[:, word] |= numbers[:, 8 * word + which].astype(np.uint32) << (4 * place)
    return torch.tensor(words.view(np.int32))


def grouped(weight: torch.Tensor, groups: np.ndarray, *, has_zeros: bool) -> Any:
    """Quantise a matrix to 4-bit numbers, with the group of each input in `groups`.

    Return the numbers [I, O], the zero points and f16 scales [groups, O], and the weights [O, I].
    """
    rng, shape = np.random.default_rng(0), (groups.max() + 1, len(weight))
    scales = rng.uniform(0.02, 0.05, shape).astype(np.float16)
    zeros = rng.integers(1, 15, shape) if has_zeros else np.full(shape, 8)
    numbers = np.round(weight.numpy().T / scales[groups].astype(np.float64) + zeros[groups])
    numbers = np.clip(numbers, 0, 15).astype(np.int64)
    meant = (numbers - zeros[groups]) * scales[groups].astype(np.float64)
    return numbers, zeros, torch.tensor(scales), torch.tensor(meant.T).float().contiguous()


def as_awq(weight: torch.Tensor, group: int) -> Written:
    if len(weight) % 8:
        return None
    groups = np.arange(weight.shape[1]) // group
    numbers, zeros, scales, meant = grouped(weight, groups, has_zeros=True)
    words = (packed_words(x, AWQ_ORDER) for x in (numbers, zeros))
    return dict(zip(("qweight", "qzeros"), words, strict=True)) | {"scales": scales}, meant


def as_gptq(weight: torch.Tensor, group: int, version: int, has_zeros: bool) -> Written:
    """Return a matrix in GPTQ. The last group may be smaller.

    If there are zero points, the inputs of a group are not adjacent (`desc_act`).
    """
    if len(weight) % 8 or weight.shape[1] % 8:
        return None
    groups = np.arange(weight.shape[1]) // (group if group > 0 else weight.shape[1])
    if has_zeros:
        groups = np.random.default_rng(1).permutation(groups)
    numbers, zeros, scales, meant = grouped(weight, groups, has_zeros=has_zeros)
    return {
        "qweight": packed_words(numbers.T).T.contiguous(),
        "qzeros": packed_words((zeros - (version == 1)) & 15),
        "scales": scales,
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }, meant


def gptq(group: int, version: int, *, has_zeros: bool) -> Form:
    named = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": has_zeros}
    write = partial(as_gptq, group=group, version=version, has_zeros=has_zeros)
    return Form(config | named | {"sym": not has_zeros}, write)


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
FORMS = {
    "pack-32": compressed("pack-quantized", strategy="group", group_size=32),
    "pack-64": compressed("pack-quantized", strategy="group", group_size=64, symmetric=False),
    "pack-128": compressed("pack-quantized", strategy="group", group_size=128),
    "pack-channel": compressed("pack-quantized", strategy="channel", symmetric=False),
    "pack-8": compressed("pack-quantized", num_bits=8, strategy="group", group_size=16),
    "int-channel": compressed("int-quantized", num_bits=8, strategy="channel"),
    "int-tensor": compressed("int-quantized", num_bits=8, strategy="tensor"),
    "nvfp4": compressed(
        "nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16
    ),
    "mxfp4": compressed("mxfp4-pack-quantized", type="float", strategy="group", group_size=32),
    "modelopt": Form({"quant_method": "modelopt", "quant_algo": "NVFP4"}, as_modelopt),
    "awq": Form(AWQ | {"group_size": 16}, partial(as_awq, group=16)),
    "fp8": Form({"quant_method": "fp8", "weight_block_size": [16, 16]}, partial(as_fp8, block=16)),
    "gptq": gptq(32, 1, has_zeros=False),
    "gptq-order": gptq(16, 1, has_zeros=True),
    "gptq-v2": gptq(-1, 2, has_zeros=True),
}


def tensors_of(form: str, tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's tensors after quantisation, and the weights that they represent."""
    stored, meant = dict(tensors), {}
    for name, tensor in tensors.items():
        if form == "modelopt" and name.startswith("mtp"):
            continue  # as published
        if QUANTISED.search(name) and (made := FORMS[form].write(tensor.float())):
            del stored[name]
            stem, meant[name] = name.removesuffix("weight"), made[1]
            stored |= {stem + ending: part for ending, part in made[0].items()}
    return stored, meant


def folders(checkpoints: Checkpoints, kind: str, form: str, **config: Any) -> tuple[Path, Path]:
    """Return a folder with a quantised model, and a folder with the same model dequantised."""
    target = checkpoints.target(kind, **config)
    if kind in ("qwen3_5_text", "deepseek_v3"):
        target = checkpoints.mtp(target, layout="single")
    narrow, plain = (checkpoints.copy(target.folder) for _ in range(2))
    file = "model.safetensors"
    rewrite(narrow / file, lambda tensors: tensors_of(form, tensors)[0])
    rewrite(plain / file, lambda tensors: tensors | tensors_of(form, tensors)[1])
    return checkpoints.copy(narrow, quantization_config=FORMS[form].config), plain
