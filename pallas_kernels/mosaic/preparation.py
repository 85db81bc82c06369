"""What a window's kernels need besides states: one small kernel over (row, value head), on the Triton route.

With ``a_t = exp(g_t)`` and ``P_t = a_0 .. a_t`` the delta rule of a window solves to

    u_t = b_t (v_t - S_0 (P_t k_t) - sum_{i<t} A_ti u_i),   A_ti = sum_K k_t k_i a_{i+1} .. a_t
    o_t = S_0 (P_t q_t) + sum_{i<=t} Q_ti u_i,               Q_ti likewise with q_t

so ``[u; o] = C v + X S_0^T`` with ``C`` [2W, W] and ``X`` [2W, K] independent of state and values. Decays are products
of factors <= 1 over exactly their own rows: nothing overflows, nothing cancels. Numbers that meet the state are split
into two bf16 terms here.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.values import FLOAT, L2_EPS, sigmoid, token_decay

WARPS = 1


def split(x):
    """fp32 ``x`` as two bf16 terms. Inside kernels only: XLA would drop the rounding."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(FLOAT)).astype(jnp.bfloat16)


def normalized(x, scale=1.0):
    x = x.astype(FLOAT)
    return x * (scale * jax.lax.rsqrt(jnp.sum(x * x) + L2_EPS))


def padded_window(W: int) -> int:
    """Windows are worked on in steps of 8 tokens."""
    return -(-W // 8) * 8


def _commit_keys(key, raw_gate, bias, rate, lower_bound, length, rows, D, store, total):
    """Keys times the decay after them, rows ``0 .. length-1``; the rest zero. ``total`` receives the whole decay."""
    after = None
    for t in reversed(range(rows)):
        folded = t < length
        k = normalized(jnp.where(folded, key(t), 0))
        a = jnp.where(folded, token_decay(raw_gate(t), bias, rate, lower_bound), 1.0)
        store(t, k if after is None else k * after)
        after = a if after is None else after * a
    total(after)


def _gate_params(refs, bounded_rate, head):
    rate = jnp.exp(refs.pop(0)[head]) if bounded_rate else 1.0
    return rate, refs.pop(0)[head]


def _store_split(ref, where, t, rows, x):
    high, low = split(x)
    ref[(*where, t)] = high
    ref[(*where, rows + t)] = low


def _window_body(*refs, W, groups, lower_bound, has_rate, fold):
    """Program (r, hv) or, with ``fold``, (r, hv, part): part 0 stores key and gate records, ``X`` and ``C``, part 1 the
    pending commit's operands. The two parts share nothing, and one after the other they need too many registers."""
    refs = list(refs)
    r, hv = pl.program_id(0), pl.program_id(1)
    if not fold:
        return _window(refs, r, hv, W, groups, lower_bound, has_rate)
    part = pl.program_id(2)
    first = 7 + has_rate
    pending, outputs = refs[first : first + 3], refs[first + 3 :]

    @pl.when(part == 0)
    def _():
        _window(refs[:first] + outputs[:4], r, hv, W, groups, lower_bound, has_rate)

    @pl.when(part == 1)
    def _():
        old_key, old_raw, commit_length = pending
        rate, bias = _gate_params(refs[6:first], has_rate, hv)
        _store_commit(
            *outputs[4:], (r, hv), old_key, old_raw, (r, hv // groups), (r, hv), bias, rate, lower_bound,
            commit_length[r], W,
        )  # fmt: skip


def _window(refs, r, hv, W, groups, lower_bound, has_rate):
    hk = hv // groups
    q_ref, k_ref, raw_ref, beta_ref, slots, lengths = (refs.pop(0) for _ in range(6))
    rate, bias = _gate_params(refs, has_rate, hv)
    x_ref, c_ref, key_out, raw_out = (refs.pop(0) for _ in range(4))
    P, K = padded_window(W), q_ref.shape[-1]
    length = jnp.where(slots[r] > 0, lengths[r], 0)

    q, k, a, b = [], [], [], []
    for t in range(W):
        inside = t < length
        key, raw = jnp.where(inside, k_ref[r, t, hk], 0), jnp.where(inside, raw_ref[r, t, hv], 0)
        raw_out[r, hv, t] = raw.astype(raw_out.dtype)
        key = key.astype(key_out.dtype)
        if groups == 1:
            key_out[r, hk, t] = key
        else:

            @pl.when(hv % groups == 0)
            def _():
                key_out[r, hk, t] = key  # noqa: B023

        q.append(normalized(jnp.where(inside, q_ref[r, t, hk], 0), K**-0.5))
        k.append(normalized(key))
        a.append(jnp.where(inside, token_decay(raw, bias, rate, lower_bound), 1.0))
        b.append(jnp.where(inside, sigmoid(beta_ref[r, t, hv].astype(FLOAT)), 0.0))

    prefix = []
    for t in range(W):
        prefix.append(a[t] if t == 0 else prefix[-1] * a[t])
    lower = [[None] * W for _ in range(W)]
    attention = [[None] * W for _ in range(W)]
    for i in range(W):
        carried = k[i]
        attention[i][i] = jnp.sum(q[i] * carried)
        for t in range(i + 1, W):
            carried = carried * a[t]
            lower[t][i] = b[t] * jnp.sum(k[t] * carried)
            attention[t][i] = jnp.sum(q[t] * carried)
    token = jax.lax.broadcasted_iota(jnp.int32, (P,), 0)
    keys, values = [], []
    for t in range(W):
        key, value = b[t] * (prefix[t] * k[t]), jnp.where(token == t, b[t], 0.0)
        for i in range(t):
            key, value = key - lower[t][i] * keys[i], value - lower[t][i] * values[i]
        keys.append(key)
        values.append(value)

    def put(row, x, c):
        _store_split(x_ref, (r, hv), row, 2 * P, x)
        high, low = split(c)
        c_ref[r, hv, row, pl.ds(0, P)] = high
        c_ref[r, hv, row, pl.ds(P, P)] = low

    for t in range(W):
        put(t, -keys[t], values[t])
        query, value = prefix[t] * q[t], jnp.zeros((P,), FLOAT)
        for i in range(t + 1):
            query, value = query - attention[t][i] * keys[i], value + attention[t][i] * values[i]
        put(P + t, query, value)
    for t in range(W, P):
        put(t, jnp.zeros((K,), FLOAT), jnp.zeros((P,), FLOAT))
        put(P + t, jnp.zeros((K,), FLOAT), jnp.zeros((P,), FLOAT))


def _store_commit(kd_ref, total_ref, to, key, raw, key_at, raw_at, bias, rate, lower_bound, length, W):
    P, K = padded_window(W), key.shape[-1]

    def total(x):
        total_ref[to] = x

    _commit_keys(
        lambda t: key[(*key_at, t)],
        lambda t: raw[(*raw_at, t)],
        bias,
        rate,
        lower_bound,
        length,
        W,
        K,
        lambda t, x: _store_split(kd_ref, to, t, P, x),
        total,
    )
    for t in range(W, P):
        _store_split(kd_ref, to, t, P, jnp.zeros((K,), FLOAT))


def _commit_body(*refs, W, rows, groups, lower_bound, has_rate, targets):
    """Program (layer * rows + r, hv): operands of the final and, with two targets, of the boundary state."""
    refs = list(refs)
    lr, hv = pl.program_id(0), pl.program_id(1)
    layer, r = lr // rows, lr % rows
    key, raw = refs.pop(0), refs.pop(0)
    lengths = [refs.pop(0) for _ in range(targets)]
    rate = jnp.exp(refs.pop(0)[layer, hv]) if has_rate else 1.0
    bias = refs.pop(0)[layer, hv]
    kd_ref, total_ref = refs
    for target, length in enumerate(lengths):
        _store_commit(
            kd_ref, total_ref, (target, lr, hv), key, raw, (lr, hv // groups), (lr, hv), bias, rate, lower_bound,
            length[r], W,
        )  # fmt: skip


def _call(body, grid, inputs, outputs, interpret, name):
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=outputs,
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=bool(interpret),
        name=name,
    )(*inputs)


def prepare_window(q, k, raw_gate, raw_beta, A_log, dt_bias, lower_bound, slots, lengths, pending=None, *, interpret):
    """Operands of verify; ``P`` is the window padded to steps of 8.

    ``pending``: (key, raw_gate, commit_length) of the previous step's records, or None. Returns ``X`` [R,HV,4P,K] bf16
    (high terms of u's and o's rows, then low terms), ``C`` [R,HV,2P,2P] bf16 (high columns, low columns), key and gate
    records; with ``pending`` also ``kd`` [R,HV,2P,K] bf16 and the total decay [R,HV,K] fp32.
    """
    R, W, H, K = q.shape
    HV, P = raw_gate.shape[2], padded_window(W)
    inputs = [q, k, raw_gate, raw_beta, slots, lengths] + ([] if A_log is None else [A_log]) + [dt_bias]
    outputs = [
        jax.ShapeDtypeStruct((R, HV, 4 * P, K), jnp.bfloat16),
        jax.ShapeDtypeStruct((R, HV, 2 * P, 2 * P), jnp.bfloat16),
        jax.ShapeDtypeStruct((R, H, W, K), k.dtype),
        jax.ShapeDtypeStruct((R, HV, W, K), raw_gate.dtype),
    ]
    if pending is not None:
        inputs += list(pending)
        outputs += [
            jax.ShapeDtypeStruct((R, HV, 2 * P, K), jnp.bfloat16),
            jax.ShapeDtypeStruct((R, HV, K), FLOAT),
        ]
    body = functools.partial(
        _window_body, W=W, groups=HV // H, lower_bound=lower_bound, has_rate=A_log is not None,
        fold=pending is not None,
    )  # fmt: skip
    grid = (R, HV) if pending is None else (R, HV, 2)
    return _call(body, grid, inputs, outputs, interpret, "kda_prepare_window")


def prepare_commit(key, raw_gate, A_log, dt_bias, lower_bound, lengths, *, interpret):
    """``kd`` [targets,L*R,HV,2P,K] bf16 and total decay [targets,L*R,HV,K] fp32 for each of ``lengths`` (int32 [R])."""
    L, R, H, W, K = key.shape
    HV, P = raw_gate.shape[2], padded_window(W)
    inputs = [key.reshape(L * R, H, W, K), raw_gate.reshape(L * R, HV, W, K), *lengths]
    inputs += ([] if A_log is None else [A_log]) + [dt_bias]
    outputs = [
        jax.ShapeDtypeStruct((len(lengths), L * R, HV, 2 * P, K), jnp.bfloat16),
        jax.ShapeDtypeStruct((len(lengths), L * R, HV, K), FLOAT),
    ]
    body = functools.partial(
        _commit_body, W=W, rows=R, groups=HV // H, lower_bound=lower_bound, has_rate=A_log is not None,
        targets=len(lengths),
    )  # fmt: skip
    return _call(body, (L * R, HV), inputs, outputs, interpret, "kda_prepare_commit")
