"""A digest of weights, to compare a trainer's and an engine's weights without transferring them."""

from hashlib import blake2b
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoint.given import paths


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
    """Return two checksums, u32[2]. They depend on the bits and on the order of the elements."""
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(x.ravel(), kind).astype(jnp.uint32)
    place = jnp.arange(words.size, dtype=jnp.uint32)
    mixed = (words ^ (place * jnp.uint32(2654435761))) * jnp.uint32(2246822519)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(3266489917)
    return jnp.stack([jnp.sum(words * (2 * place + 1)), jnp.sum(mixed ^ (mixed >> 13))])


def checksum(params: Any) -> str:
    """Return a digest, 32 hex digits, of a tree's arrays: their bits, dtypes, shapes and paths.

    The arrays must have 8, 16 or 32 bits per element. The digest does not depend on the kind of
    device. The elements of an array are summed on the array's device, so no weights are
    transferred. The digest is not cryptographic: it detects mistakes, not forgeries.

    Raises:
        NotImplementedError: other processes have some of the arrays.
    """
    leaves = paths(params)
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves.values()):
        raise NotImplementedError(
            "checksum reads all weights, and other processes have some of them; compare the "
            "folders that the weights were read from"
        )
    digests = jax.device_get([_digest(jnp.asarray(leaf)) for leaf in leaves.values()])
    whole = blake2b(digest_size=16)
    for (path, leaf), digest in zip(leaves.items(), digests, strict=True):
        whole.update(f"{path} {leaf.dtype}{list(leaf.shape)}".encode() + digest.tobytes())
    return whole.hexdigest()
