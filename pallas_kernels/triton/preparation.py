"""What windows and commits need besides states: a small kernel over (row, value head) before the one that moves states.

The state kernels have several programs a head, each of which would do this work again.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import values
from pallas_kernels.triton._launch import (
    FLOAT,
    PREPARED_PER_WARP,
    along,
    key_tile,
    load,
    named,
    store,
    token_tile,
    within,
)


def prepare_window(q, k, raw_gate, raw_beta, A_log, dt_bias, lower_bound, slots, lengths, pending=None, *, interpret):
    """Operands of a window, and the records of its keys and gates.

    Args:
      pending: (key, raw_gate, commit_length) of the records to fold first, or None.

    Returns:
      ``X`` [R, HV, 2T, Kt], ``C`` [R, HV, 2T, 2T] (columns from ``T`` on zero), the key and gate records and, with
      ``pending``, the commit operand [R, HV, W + 1, Kt] (keys, then the total decay); ``T`` and ``Kt`` are tile sizes.
    """
    R, W, H, K = q.shape
    HV = raw_gate.shape[2]
    tile, columns = token_tile(W), key_tile(K)
    inputs = {"q": q, "k": k, "raw_gate": raw_gate, "raw_beta": raw_beta, "A_log": A_log, "dt_bias": dt_bias}
    inputs |= {"slots": slots, "lengths": lengths}
    outputs = {
        "X": jax.ShapeDtypeStruct((R, HV, 2 * tile, columns), FLOAT),
        "C": jax.ShapeDtypeStruct((R, HV, 2 * tile, 2 * tile), FLOAT),
        "key_record": jax.ShapeDtypeStruct((R, H, W, K), k.dtype),
        "gate_record": jax.ShapeDtypeStruct((R, HV, W, K), raw_gate.dtype),
    }
    if pending is not None:
        inputs |= dict(zip(("old_key", "old_gate", "commit_length"), pending, strict=True))
        outputs["folded"] = jax.ShapeDtypeStruct((R, HV, pending[0].shape[2] + 1, columns), FLOAT)
    body = functools.partial(_window_body, W=W, groups=HV // H, lower_bound=lower_bound)
    return named(
        body, inputs, outputs, name="kda_prepare_window", grid=(HV, R), warps=_warps(tile, columns), interpret=interpret
    )


def prepare_commit(key, raw_gate, A_log, dt_bias, lower_bound, lengths, *, interpret):
    """The commit operand [targets, L, R, HV, W + 1, Kt] fp32 for each of ``lengths`` (int32 [R])."""
    L, R, H, W, K = key.shape
    HV = raw_gate.shape[2]
    columns = key_tile(K)
    inputs = {"key": key, "raw_gate": raw_gate, "A_log": A_log, "dt_bias": dt_bias}
    inputs |= {f"length{i}": length for i, length in enumerate(lengths)}
    outputs = {"folded": jax.ShapeDtypeStruct((len(lengths), L, R, HV, W + 1, columns), FLOAT)}
    body = functools.partial(_commit_body, targets=len(lengths), groups=HV // H, lower_bound=lower_bound)
    warps = _warps(token_tile(W), columns)
    (folded,) = named(
        body, inputs, outputs, name="kda_prepare_commit", grid=(HV, R, L), warps=warps, interpret=interpret
    )
    return folded


def _warps(tile, columns):
    return max(1, min(8, tile * columns // PREPARED_PER_WARP))


def gate_parameters(refs, at):
    """Rate (a scalar) and bias [1, Kt] of a head."""
    K = refs.dt_bias.shape[-1]
    channel = along(1, key_tile(K))
    rate = jnp.exp(refs.A_log[at]) if hasattr(refs, "A_log") else 1.0
    return rate, load(refs.dt_bias, (*at, channel), within(channel, K, key_tile(K)))


def _window_body(refs, *, W, groups, lower_bound):
    hv, r = pl.program_id(0), pl.program_id(1)
    K, tile = refs.q.shape[-1], token_tile(W)
    columns = key_tile(K)
    token, channel = along(0, tile), along(1, columns)
    inside = within(channel, K, columns)
    hk = jax.lax.div(hv, groups)
    length = jnp.where(refs.slots[r] > 0, refs.lengths[r], 0)
    valid = token < length
    q = load(refs.q, (r, token, hk, channel), valid, inside)
    k = load(refs.k, (r, token, hk, channel), valid, inside)
    raw_gate = load(refs.raw_gate, (r, token, hv, channel), valid, inside)
    raw_beta = load(refs.raw_beta, (r, token, hv), valid)
    rate, bias = gate_parameters(refs, (hv,))
    queries, keys, decay, beta = values.window_inputs(q, k, raw_gate, raw_beta, bias, rate, lower_bound, length, K)
    kept = within(token, W, tile)
    store(
        refs.key_record, (r, hk, token, channel), k, kept, inside, jax.lax.rem(hv, groups) == 0 if groups > 1 else None
    )
    store(refs.gate_record, (r, hv, token, channel), raw_gate, kept, inside)
    operands = values.window_operands(queries, keys, decay, beta, W)
    other = along(1, tile)
    for half, (of_state, of_values) in enumerate(zip(operands[:2], operands[2:], strict=True)):
        store(refs.X, (r, hv, token + half * tile, channel), of_state)
        store(refs.C, (r, hv, token + half * tile, other), of_values)
        store(refs.C, (r, hv, token + half * tile, other + tile), jnp.zeros_like(of_values))
    if hasattr(refs, "folded"):
        n = refs.commit_length[r]
        _store_commit(refs.folded, (r, hv), refs.old_key, (r, hk), refs.old_gate, (r, hv), rate, bias, lower_bound, n)


def _commit_body(refs, *, targets, groups, lower_bound):
    hv, r, layer = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    rate, bias = gate_parameters(refs, (layer, hv))
    for target in range(targets):
        _store_commit(
            refs.folded,
            (target, layer, r, hv),
            refs.key,
            (layer, r, jax.lax.div(hv, groups)),
            refs.raw_gate,
            (layer, r, hv),
            rate,
            bias,
            lower_bound,
            getattr(refs, f"length{target}")[r],
        )


def _store_commit(folded, to, key_ref, key_at, gate_ref, gate_at, rate, bias, lower_bound, length):
    W, K = key_ref.shape[-2:]
    tile, columns = token_tile(W), key_tile(K)
    token, channel = along(0, tile), along(1, columns)
    masks = token < length, within(channel, K, columns)
    key = load(key_ref, (*key_at, token, channel), *masks)
    raw_gate = load(gate_ref, (*gate_at, token, channel), *masks)
    keys, total = values.commit_operands(
        *values.commit_inputs(key, raw_gate, bias, rate, lower_bound, length), window=W
    )
    store(folded, (*to, token, channel), keys, within(token, W, tile))
    store(folded, (*to, W, channel), total)
