"""Runs a decode step of the gated delta rule.

A program owns some rows of one value head's state, which are independent of the other rows. It
reads its rows once and updates them with the pending tokens (accepted tokens that the state lacks).
It writes the rows if there were pending tokens, and then runs the new tokens in registers. Another
kernel has prepared the state-independent part (`inputs.py`). So programs are short and need few
registers. Many programs share a multiprocessor, and some programs load while other programs
compute.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_rule.triton.batch_row import BatchRow
from pallas_kernels.gated_delta_rule.triton.inputs import prepare_inputs
from pallas_kernels.gated_delta_rule.triton.rings import Rings, correct, over_keys
from pallas_kernels.gated_delta_rule.triton.tuning import has_one_owner
from pallas_kernels.triton_call import barrier, load, triton_call


def run_step(x, weights, cache, where, config, interpret):
    """Return outputs [B, T, H_v, D_v] before the norm, and the updated cache.

    `where` is (layer, slots, positions, pending).
    """
    heads, (batch, length, _) = cache.heads, x.shape
    inputs, cache = prepare_inputs(x, weights, cache, where[:3], config=config, interpret=interpret)
    tile, piece = min(config.values, heads.value_dim), min(config.piece, heads.key_dim)
    assert has_one_owner(tile * piece, config.num_warps), config
    owned = cache.state, cache.u
    out = jax.ShapeDtypeStruct((batch, length, heads.num_values, heads.value_dim), x.dtype)
    state, u, out = triton_call(
        partial(
            _step_kernel,
            piece=piece,
            tile=tile,
            fold_tokens=min(config.fold_tokens, cache.max_pending),
            interpret=interpret,
        ),
        [*owned, cache.k, cache.decay, *inputs, *where],
        [*(jax.ShapeDtypeStruct(z.shape, z.dtype) for z in owned), out],
        name="gated_delta_rule",
        grid=(heads.value_dim // tile, heads.num_values, batch),
        num_warps=config.num_warps,
        aliases={0: 0, 1: 1},
        interpret=interpret,
    )
    return out, cache._replace(state=state, u=u)


def _step_kernel(*refs, piece, tile, fold_tokens, interpret):
    _, _, k_ref, decay_ref, q_ref, v_ref, beta_ref, *refs = refs
    layer_ref, slots_ref, positions_ref, pending_ref, state_ref, u_ref, out_ref = refs
    _, num_slots, num_heads, _, key_dim = state_ref.shape

    part, head, row = (pl.program_id(i) for i in range(3))
    row = BatchRow.read(row, layer_ref, slots_ref, positions_ref)
    is_live = row.is_live(num_slots)
    values = part * tile + jnp.arange(tile, dtype=jnp.int32)
    pieces = [p * piece + jnp.arange(piece, dtype=jnp.int32) for p in range(key_dim // piece)]
    rings = Rings(u_ref, k_ref, decay_ref, row, head, values, pieces)
    key_head = head // (num_heads // q_ref.shape[2])

    def read(t):
        """Return e^g, k, v and beta of a new token."""
        decay, k = rings.read(row.start + t)
        return decay, k, v_ref[row.index, t, head, values], beta_ref[row.index, t, head]

    def verify(t, carry):
        states, (decay, k, v, beta) = carry
        q = [q_ref[row.index, t, key_head, keys] for keys in pieces]
        states = [s * decay for s in states]
        u = beta * (v - over_keys(states, k, interpret=interpret))
        states = correct(states, u, k, interpret=interpret)
        # Load the next token before storing this token's results, because the load would wait for
        # the stores. The next token takes over this token's registers.
        following = read(jnp.minimum(t + 1, row.count - 1))
        rings.u_at(row.start + t)[...] = u
        o = over_keys(states, q, interpret=interpret)
        out_ref[row.index, t, head, values] = o.astype(out_ref.dtype)
        return states, following

    first = row.start - row.num_pending(pending_ref, u_ref.shape[2])

    # `first` is never below 0: the check makes `pending` load before the branch, see `is_live`.
    @pl.when(is_live & (first >= 0))
    def _():
        own = [(row.layer, row.slot, head, values[:, None], keys[None]) for keys in pieces]
        known = jnp.broadcast_to(first > 0, (tile, piece))
        states = [load(state_ref.at[at], mask=known, other=0.0) for at in own]
        states = rings.fold(states, first, tokens=fold_tokens, interpret=interpret)
        token = read(0)

        @pl.when(first < row.start)  # otherwise the state is unchanged or empty
        def _():
            for at, s in zip(own, states, strict=True):
                state_ref[at] = s

        if not interpret:
            # Wait until every thread has read the pending u, whose columns new u may overwrite.
            states = barrier(states)
        jax.lax.fori_loop(0, row.count, verify, (states, token))

    def clear(t, _):
        out_ref[row.index, t, head, values] = jnp.zeros((tile,), out_ref.dtype)

    jax.lax.fori_loop(jnp.where(is_live, row.count, 0), out_ref.shape[1], clear, None)
