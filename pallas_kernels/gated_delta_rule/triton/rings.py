"""The rings of u, k and e^g, as seen by a program that owns some rows of a state.

It holds the rows as arrays [rows, piece], one for each piece of D_k.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.triton.batch_row import BatchRow, column_of
from pallas_kernels.triton_call import multiply_add


class Rings(NamedTuple):
    """The rings' refs, and what of them belongs to the rows."""

    u: Any
    k: Any
    decay: Any
    row: BatchRow
    head: Any  # value head
    values: Any  # i32[rows]
    pieces: list[Any]  # i32[piece] of D_k, each

    def u_at(self, place):
        """Return the ref of the corrections [rows] of the token at a position."""
        column = column_of(place, self.u.shape[2])
        return self.u.at[self.row.layer, self.row.slot, column, self.head, self.values]

    def read(self, place):
        """Return e^g, and k in pieces, of the token at a position."""
        at = self.row.layer, self.row.slot, column_of(place, self.k.shape[2])
        num_keys, num_heads = self.k.shape[3], self.decay.shape[3]
        key_head = self.head // (num_heads // num_keys)
        return self.decay[*at, self.head], [self.k[*at, key_head, piece] for piece in self.pieces]

    def fold(self, states, first, *, interpret):
        """Fold the tokens from position `first` on, up to the first new one, into the states."""

        def fold_one(place, states):
            decay, k = self.read(place)
            states = [s * decay for s in states]
            return correct(states, self.u_at(place)[...], k, interpret=interpret)

        return jax.lax.fori_loop(first, self.row.start, fold_one, states)


def correct(states, u, k, *, interpret):
    """Compute S + u k^T. One function for folding and verifying: they must round alike."""
    return [
        multiply_add(_wide(u[:, None], s), _wide(piece[None], s), s, interpret=interpret)
        for s, piece in zip(states, k, strict=True)
    ]


def over_keys(states, k, *, interpret):
    """Compute S k: [rows]. Pieces are added first, within threads."""
    sums = states[0] * k[0][None]
    for s, piece in zip(states[1:], k[1:], strict=True):
        sums = multiply_add(s, _wide(piece[None], s), sums, interpret=interpret)
    return jnp.sum(sums, axis=1)


def _wide(z, s):
    return jnp.broadcast_to(z, s.shape)
