"""The ring buffers of recent tokens, for a program that owns some rows of a recurrent state.

A token's entries are the correction u of the state, the key k and the decay e^g. The D_k columns of
a state are divided into pieces. The program holds its rows as a list of arrays [rows, piece], with
one array for each piece.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.triton.batch_row import BatchRow, column_of
from pallas_kernels.triton_call import multiply_add


class Rings(NamedTuple):
    """References to the ring buffers, and the rows of the state that a program owns."""

    u: Any
    k: Any
    decay: Any
    row: BatchRow
    head: Any  # value head
    values: Any  # i32[rows], the numbers of the owned rows, in 0..D_v - 1
    pieces: list[Any]  # an array i32[piece] of column numbers for each piece, in 0..D_k - 1

    def u_at(self, place):
        """Return the ref of the correction u [rows] of the token at position `place`."""
        column = column_of(place, self.u.shape[2])
        return self.u.at[self.row.layer, self.row.slot, column, self.head, self.values]

    def read(self, place):
        """Return e^g, and a list of the pieces of k, for the token at position `place`."""
        at = self.row.layer, self.row.slot, column_of(place, self.k.shape[2])
        num_keys, num_heads = self.k.shape[3], self.decay.shape[3]
        key_head = self.head // (num_heads // num_keys)
        return self.decay[*at, self.head], [self.k[*at, key_head, piece] for piece in self.pieces]

    def fold(self, states, first, *, tokens, interpret):
        """Return the states, updated with the accepted tokens that they lack.

        These tokens have the positions `first` to `self.row.start` - 1. Their entries are loaded
        for `tokens` tokens at a time.
        """
        start = self.row.start

        def fold_some(i, states):
            places = [first + i * tokens + n for n in range(tokens)]
            read = [self.read(jnp.minimum(place, start - 1)) for place in places]
            us = [self.u_at(jnp.minimum(place, start - 1))[...] for place in places]
            for place, (decay, k), u in zip(places, read, us, strict=True):
                # Past the last token, e^g = 1 and u = 0 leave the states' bits unchanged.
                decay, u = (jnp.where(place < start, *z) for z in ((decay, 1.0), (u, 0.0)))
                states = correct([s * decay for s in states], u, k, interpret=interpret)
            return states

        num_steps = (start - first + tokens - 1) // tokens
        return jax.lax.fori_loop(0, num_steps, fold_some, states)


def correct(states, u, k, *, interpret):
    """Return S + u k^T.

    This is the update of a state S with a token. The verification of a draft and the later update
    with the accepted token both call this function, because they must round in the same way.
    """
    return [
        multiply_add(_wide(u[:, None], s), _wide(piece[None], s), s, interpret=interpret)
        for s, piece in zip(states, k, strict=True)
    ]


def over_keys(states, k, *, interpret):
    """Return the product S k [rows]. S and k are lists of pieces along the D_k axis.

    Each thread first adds its products over all pieces. Then the threads add their sums.
    """
    sums = states[0] * k[0][None]
    for s, piece in zip(states[1:], k[1:], strict=True):
        sums = multiply_add(s, _wide(piece[None], s), sums, interpret=interpret)
    return jnp.sum(sums, axis=1)


def _wide(z, s):
    return jnp.broadcast_to(z, s.shape)
