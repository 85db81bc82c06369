"""The mathematics of every operation in fp64 numpy, one token after another, in the plainest form.

Nothing here is chunked, fused or in closed form, and nothing is shared with the package: arguments are arrays (or have
`A_log`, `dt_bias`, `lower_bound`, as gates do, or the five fields of a commit plan), results are numpy arrays.
States are value first, [..., HV, V, K]. Inputs at or past a row's length may hold anything.
"""

from typing import NamedTuple

import numpy as np

L2_EPS = 1e-6


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def sigmoid(x):
    x = f64(x)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def silu(x):
    return f64(x) * sigmoid(x)


def softplus(x):
    """log(1 + exp(x)), the identity above 20."""
    x = f64(x)
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def l2_normalize(x, eps=L2_EPS):
    x = f64(x)
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)


def gate(raw_gate, A_log, dt_bias, lower_bound=None):
    """[..., HV, K], [HV] or None, [HV, K] -> log decay [..., HV, K]."""
    x = f64(raw_gate) + f64(dt_bias)
    a = 1.0 if A_log is None else np.exp(f64(A_log))[..., None]
    if lower_bound is None:
        return -a * softplus(x)
    return lower_bound * sigmoid(a * x)


def token_step(state, q, k, v, log_decay, beta):
    """One token, all value heads: state [HV,V,K], q, k, log_decay [HV,K], v [HV,V], beta [HV] -> o, u, state.

    q already carries its scale; `u` is the correction that was written.
    """
    decayed = state * np.exp(log_decay)[:, None, :]
    u = beta[:, None] * (v - np.einsum("hvk,hk->hv", decayed, k))
    state = decayed + np.einsum("hv,hk->hvk", u, k)
    return np.einsum("hvk,hk->hv", state, q), u, state


def heads(x, HV, axis):
    """Value head hv uses query/key head hv // (HV / H)."""
    return np.repeat(x, HV // x.shape[axis], axis=axis)


def recurrent(q, k, v, log_decay, beta, initial_state=None, scale=None, lengths=None):
    """q, k [B,T,H,K], v [B,T,HV,V], log_decay [B,T,HV,K], beta [B,T,HV] -> o [B,T,HV,V], state [B,HV,V,K]."""
    q, k, v, log_decay, beta = map(f64, (q, k, v, log_decay, beta))
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    lengths = [T] * B if lengths is None else np.asarray(lengths)
    q, k = heads(q, HV, 2), heads(k, HV, 2)
    state = np.zeros((B, HV, V, K)) if initial_state is None else f64(initial_state).copy()
    o = np.zeros((B, T, HV, V))
    for b in range(B):
        for t in range(lengths[b]):
            o[b, t], _, state[b] = token_step(state[b], scale * q[b, t], k[b, t], v[b, t], log_decay[b, t], beta[b, t])
    return o, state


def recurrent_gradients(do, dstate, q, k, v, log_decay, beta, initial_state, scale=None, lengths=None):
    """The adjoint of `recurrent`: gradients of sum(o * do) + sum(state * dstate), by name of the argument."""
    q, k, v, log_decay, beta, initial_state, do = map(f64, (q, k, v, log_decay, beta, initial_state, do))
    B, T, H, K = q.shape
    HV = v.shape[2]
    scale = K**-0.5 if scale is None else scale
    lengths = [T] * B if lengths is None else np.asarray(lengths)
    q, k = heads(q, HV, 2), heads(k, HV, 2)
    dq, dk, dv, dg, db = (np.zeros(x.shape) for x in (q, k, v, log_decay, beta))
    dS = f64(dstate).copy()
    for b in range(B):
        states = [initial_state[b]]
        for t in range(lengths[b]):
            states.append(token_step(states[-1], q[b, t], k[b, t], v[b, t], log_decay[b, t], beta[b, t])[2])
        for t in reversed(range(lengths[b])):
            decay = np.exp(log_decay[b, t])[:, None, :]
            decayed = states[t] * decay
            e = v[b, t] - np.einsum("hvk,hk->hv", decayed, k[b, t])
            dq[b, t] = scale * np.einsum("hvk,hv->hk", states[t + 1], do[b, t])
            dS[b] += scale * np.einsum("hv,hk->hvk", do[b, t], q[b, t])
            du = np.einsum("hvk,hk->hv", dS[b], k[b, t])
            db[b, t] = np.sum(du * e, axis=-1)
            dv[b, t] = de = beta[b, t][:, None] * du
            dk[b, t] = np.einsum("hvk,hv->hk", dS[b], beta[b, t][:, None] * e) - np.einsum("hvk,hv->hk", decayed, de)
            d_decayed = dS[b] - np.einsum("hv,hk->hvk", de, k[b, t])
            dg[b, t] = np.sum(d_decayed * decayed, axis=1)
            dS[b] = d_decayed * decay
    dq, dk = (x.reshape(B, T, H, HV // H, K).sum(axis=3) for x in (dq, dk))
    return {"q": dq, "k": dk, "v": dv, "log_decay": dg, "beta": db, "initial_state": dS}


def gate_gradients(dg, raw_gate, A_log, dt_bias, lower_bound=None):
    """The adjoint of `gate`: d raw_gate, d A_log, d dt_bias."""
    x, a = f64(raw_gate) + f64(dt_bias), np.exp(f64(A_log))[:, None]
    s = sigmoid(x if lower_bound is None else a * x)
    if lower_bound is None:
        dx, d_log = dg * -a * s, dg * -a * softplus(x)
    else:
        du = dg * lower_bound * s * (1 - s)
        dx, d_log = a * du, du * a * x
    rest = tuple(range(dx.ndim - 2))
    return {"raw_gate": dx, "A_log": d_log.sum(axis=(*rest, -1)), "dt_bias": dx.sum(axis=rest)}


def conv_prefill(x, weight, history=None, lengths=None):
    """x [B,T,C], weight [C,Wc], history [B,Wc-1,C] -> y [B,T,C], history. weight[:, -1] multiplies the current row."""
    x, weight = f64(x), f64(weight)
    B, T, C = x.shape
    taps = weight.shape[1]
    history = np.zeros((B, taps - 1, C)) if history is None else f64(history)
    lengths = [T] * B if lengths is None else np.asarray(lengths)
    y, kept = np.zeros((B, T, C)), np.zeros((B, taps - 1, C))
    for b in range(B):
        rows = np.concatenate([history[b], x[b, : lengths[b]]])
        for t in range(lengths[b]):
            y[b, t] = silu(np.sum(weight.T * rows[t : t + taps], axis=0))
        kept[b] = rows[len(rows) - (taps - 1) :]
    return y, kept


def conv_step(x, weight, history_pool, slots, lengths):
    """x [R,W,C], history_pool [N,Wc-1,C] -> y [R,W,C]; a row of slot 0 is zero."""
    lengths = np.where(np.asarray(slots) == 0, 0, lengths)
    return conv_prefill(x, weight, history=np.asarray(history_pool)[slots], lengths=lengths)[0]


def _normalized(q, k, HV, axis):
    return heads(l2_normalize(q) * q.shape[-1] ** -0.5, HV, axis), heads(l2_normalize(k), HV, axis)


def _log_decay(raw_gate, gate_params):
    return gate(raw_gate, gate_params.A_log, gate_params.dt_bias, gate_params.lower_bound)


def decode(q, k, v, raw_gate, raw_beta, gate_params, state_pool, slots):
    """One token for each row, what the layer computed after its convolution -> o [R,HV,V], the next pool (fp64)."""
    pool, o = f64(state_pool), np.zeros(np.shape(v))
    q, k = _normalized(f64(q), f64(k), o.shape[1], 1)
    log_decay, beta = _log_decay(raw_gate, gate_params), sigmoid(raw_beta)
    for r, slot in enumerate(np.asarray(slots)):
        if slot != 0:
            o[r], _, pool[slot] = token_step(pool[slot], q[r], k[r], f64(v)[r], log_decay[r], beta[r])
    return o, pool


class Records(NamedTuple):
    correction: np.ndarray  # [R, HV, W, V]
    key: np.ndarray  # [R, H, W, K], as it came
    raw_gate: np.ndarray  # [R, HV, W, K], as it came


def verify(q, k, v, raw_gate, raw_beta, gate_params, state_pool, slots, lengths):
    """q, k [R,W,H,K], v [R,W,HV,V], raw_gate [R,W,HV,K], raw_beta [R,W,HV] -> o [R,W,HV,V], Records."""
    R, W, H, K = np.shape(q)
    HV, V = np.shape(v)[2:]
    o, u = np.zeros((R, W, HV, V)), np.zeros((R, HV, W, V))
    key, kept_gate = np.zeros((R, H, W, K), np.asarray(k).dtype), np.zeros((R, HV, W, K), np.asarray(raw_gate).dtype)
    for r in range(R):
        if slots[r] == 0:
            continue
        state = f64(state_pool)[slots[r]]
        for t in range(lengths[r]):
            q_t, k_t = _normalized(f64(q)[r, t], f64(k)[r, t], HV, 0)
            log_decay = _log_decay(np.asarray(raw_gate)[r, t], gate_params)
            beta = sigmoid(np.asarray(raw_beta)[r, t])
            o[r, t], u[r, :, t], state = token_step(state, q_t, k_t, f64(v)[r, t], log_decay, beta)
            key[r, :, t], kept_gate[r, :, t] = np.asarray(k)[r, t], np.asarray(raw_gate)[r, t]
    return o, Records(u, key, kept_gate)


class Plan(NamedTuple):
    commit_length: np.ndarray
    source_slot: np.ndarray
    final_slot: np.ndarray
    boundary_slot: np.ndarray
    boundary_length: np.ndarray


def plan_commit(num_accepted, lengths, slots, block_table=None, num_computed=None, block_size=None):
    """All per speculative row; with a block table: mode align. A row that commits nothing has five zeros."""
    rows = []
    for r, slot in enumerate(slots):
        n = min(max(int(num_accepted[r]), 0), int(lengths[r]))
        if slot == 0 or n == 0:
            rows.append((0, 0, 0, 0, 0))
        elif block_table is None:
            rows.append((n, int(slot), int(slot), 0, 0))
        else:
            c = int(num_computed[r])
            final = block_table[r][(c + n - 1) // block_size]
            boundary = (c // block_size + 1) * block_size
            crossed = c + n >= boundary
            at_boundary = (block_table[r][boundary // block_size - 1], boundary - c) if crossed else (0, 0)
            rows.append((n, int(slot), int(final), *map(int, at_boundary)))
    return Plan(*np.array(rows, np.int32).reshape(-1, 5).T)


def _written(pool, plan, advance):
    """Slots the plan writes, with their new contents: advance(row, content, count) steps through `count` tokens."""
    plan = Plan(*(np.asarray(getattr(plan, name)) for name in Plan._fields))
    new = {}
    for r in range(len(plan.commit_length)):
        if plan.commit_length[r] > 0:
            old = f64(pool[plan.source_slot[r]])
            new[int(plan.final_slot[r])] = advance(r, old, plan.commit_length[r])
            if plan.boundary_slot[r] != 0:
                new[int(plan.boundary_slot[r])] = advance(r, old, plan.boundary_length[r])
    return new


def commit(state_pool, q, k, v, raw_gate, raw_beta, gate_params, plan):
    """Commit by decoding the accepted tokens again (no records) -> {slot written: state [HV,V,K]}."""

    def advance(r, state, count):
        for t in range(count):
            one = (np.asarray(x)[r, t][None] for x in (q, k, v, raw_gate, raw_beta))
            state = decode(*one, gate_params, np.stack([state, state]), [1])[1][1]
        return state

    return _written(np.asarray(state_pool), plan, advance)


def fold(state_pool, records, gate_params, plan):
    """Commit from any records, one token after another -> {slot written: state [HV,V,K]}."""
    u = f64(records.correction)

    def advance(r, state, count):
        for t in range(count):
            decay = np.exp(_log_decay(np.asarray(records.raw_gate)[r, :, t], gate_params))
            k = heads(l2_normalize(np.asarray(records.key)[r, :, t]), u.shape[1], 0)
            state = state * decay[:, None, :] + np.einsum("hv,hk->hvk", u[r, :, t], k)
        return state

    return _written(np.asarray(state_pool), plan, advance)


def conv_commit(history_pool, x, plan):
    """history_pool [N,Wc-1,C], x [R,W,C] -> {slot written: history [Wc-1,C]}."""

    def advance(r, history, count):
        return np.concatenate([history, f64(np.asarray(x)[r])[:count]])[count:]

    return _written(np.asarray(history_pool), plan, advance)
