"""The formats of pages with 8 bits per number.

To store a number x, a pool with such a format holds x / s in 8 bits, and an f32 array `scales`
holds the scale s. A pool of another dtype holds x itself and has no scales.
"""

from typing import Any, NamedTuple


class PageFormat(NamedTuple):
    """How a pool stores numbers in 8 bits.

    Attributes:
        dtype: the dtype of stored numbers.
        largest: the largest stored number.
        has_token_scales: if true, each token has its own scales, which are computed when the token
            is written. If false, each layer has scales, which the caller provides, or None if all
            are 1.
        min_capability: the first compute capability with an instruction that converts to `dtype`.
    """

    dtype: str
    largest: float
    has_token_scales: bool
    min_capability: tuple[int, int]


FP8 = PageFormat("float8_e4m3fn", 448.0, False, (8, 9))
INT8 = PageFormat("int8", 127.0, True, (8, 0))
# The same numbers as bytes, for CPUs: to read or write a part of a float8 array, XLA converts all
# of it to float16 there.
FP8_BYTES = FP8._replace(dtype="uint8")
MAX_SIGNED = 2**31
# By the names that users give. The formats' dtypes must differ.
PAGE_FORMATS = {"fp8": FP8, "fp8_e4m3": FP8, "int8": INT8, "int8_per_token_head": INT8}


def page_format(dtype: Any) -> PageFormat | None:
    """Return the 8-bit format of pools with `dtype`; None if the numbers are not quantised."""
    known = *PAGE_FORMATS.values(), FP8_BYTES
    return next((one for one in known if one.dtype == str(dtype)), None)


def why_no_kernel(pool: Any, capability: tuple[int, int] | None) -> str | None:
    """Return why Triton kernels cannot use a pool on a GPU; None if they can.

    `capability` is the GPU's compute capability, or None to ignore it.
    """
    stored = page_format(pool.dtype)
    if stored is None:
        return None
    if capability is not None and capability < stored.min_capability:
        needed = "{}.{}".format(*stored.min_capability)
        return f"a pool of {pool.dtype} needs compute capability {needed}"
    # Up to 4 GiB, Pallas uses 32-bit element offsets, which Triton treats as signed.
    if MAX_SIGNED < pool.size <= 2 * MAX_SIGNED:
        return (
            f"a pool of {pool.size / 2**30:.1f} GiB in {pool.dtype}: the Triton kernel takes up to "
            "2 GiB or more than 4 GiB of one-byte numbers"
        )
    return None


def check_scales(pool: Any, scales: Any, name: str, parts: tuple[int, ...]) -> None:
    """Check the scales of a pool [L, pages, page_size, ...].

    `name` is the pool's name in errors. A token's entry has parts with separate scales: keys and
    values of each head, or a latent and the rotated part of a key. `parts` is the shape of these
    scales. Scales of tokens are f32[L, pages, page_size, *parts], and scales of layers are
    f32[L, parts[0]].

    Raises:
        ValueError: scales are missing, are given for a pool that has none, or have another shape or
            dtype.
    """
    stored = page_format(pool.dtype)
    if stored is None:
        if scales is not None:
            raise ValueError(f"scales are for a pool of 8-bit numbers; {name} has {pool.dtype}")
        return
    needed = (*pool.shape[:3], *parts) if stored.has_token_scales else (pool.shape[0], parts[0])
    if scales is None and stored.has_token_scales:
        raise ValueError(f"scales are missing: {name} of {pool.dtype} needs f32{list(needed)}")
    if scales is not None and (scales.shape != needed or str(scales.dtype) != "float32"):
        raise ValueError(
            f"scales of {name} in {pool.dtype} must be f32{list(needed)}; got {scales.dtype}"
            f"{list(scales.shape)}"
        )
