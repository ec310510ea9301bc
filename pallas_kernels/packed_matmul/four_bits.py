"""How 4-bit numbers are coded and packed into bytes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MAX_HALF = 64
# The numbers of E2M1 codes without a sign (OCP Microscaling, 2023); 8 is added for the sign.
E2M1 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0


class FourBits(NamedTuple):
    """The kind of 4-bit numbers in a matrix, and the size of their groups."""

    group: int  # the number of inputs that share a scale
    is_float: bool = False  # whether codes are floats (E2M1), not integers

    @property
    def half(self) -> int:
        """The number H of bytes in a run; see `packed_matmul`."""
        return math.gcd(self.group, MAX_HALF)

    def num_groups(self, depth: int) -> int:
        """Return the number of groups into which `depth` inputs are divided."""
        return -(-depth // self.group)

    def width(self, depth: int) -> int:
        """Return the number of bytes, with padding, that hold one output's `depth` codes."""
        return -(-depth // (2 * self.half)) * self.half

    def pack(self, codes: Any, xp: Any = jnp) -> Any:
        """Pack codes u8[..., I], which are 0 to 15, into u8[..., bytes].

        `xp` is the module of the codes' array type: NumPy or `jax.numpy`.
        """
        *others, depth = codes.shape
        padding = [(0, 0)] * len(others) + [(0, 2 * self.width(depth) - depth)]
        runs = xp.pad(codes, padding).reshape(*others, -1, 2, self.half)
        return (runs[..., 0, :] | (runs[..., 1, :] << 4)).reshape(*others, -1)

    def numbers(self, values: jax.Array, depth: int) -> jax.Array:
        """Return the numbers f32[..., depth] of packed values [..., bytes].

        Integer codes 0..15 become -8..7. Float codes become the floats (E2M1) that they encode.
        """
        *others, _ = values.shape
        runs = values.reshape(*others, -1, self.half)
        codes = jnp.concatenate([runs & 15, runs >> 4], axis=-1).reshape(*others, -1)
        if self.is_float:
            return jnp.array([*E2M1, *(-x for x in E2M1)], jnp.float32)[codes[..., :depth]]
        return codes[..., :depth].astype(jnp.float32) - 8


def powers(exponents: jax.Array) -> jax.Array:
    """Return 2^(exponents - 127) as f32, for exponents u8 from 0 to 254."""
    bits = exponents.astype(jnp.int32)
    bits = jnp.where(bits > 0, bits << 23, 1 << 22)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
