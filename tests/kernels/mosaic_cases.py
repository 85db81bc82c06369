"""Inputs, an fp64 oracle and checks for the Mosaic GPU kernels; used by the tests and runnable on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    R: int = 3
    W: int = 8
    H: int = 1
    HV: int = 1
    K: int = 64
    V: int = 64
    N: int = 9
    dtype: str = "bfloat16"
    state: str = "float32"
    bound: float | None = None
    rate: bool = True
    strong: bool = False  # strong decay in the first tokens of a window, weak after
    seed: int = 0


def rms(x, reference):
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    assert np.isfinite(x).all(), "not finite"
    return float(np.sqrt(np.mean((x - reference) ** 2) / max(np.mean(reference**2), 1e-30)))


def _normalized(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def make(case: Case):
    """A window's raw inputs, as numpy fp32 values that the activation dtype holds exactly."""
    rng = np.random.default_rng(case.seed)
    c = case

    def act(*shape, scale=1.0):
        return np.array(jnp.asarray(rng.normal(size=shape) * scale, c.dtype).astype(jnp.float32))

    raw_gate = act(c.R, c.W, c.HV, c.K, scale=2.0)
    if c.strong:
        raw_gate[:, : max(c.W // 2, 1)] = 12.0
        raw_gate[:, max(c.W // 2, 1) :] = -6.0
    out = dict(
        q=act(c.R, c.W, c.H, c.K),
        k=act(c.R, c.W, c.H, c.K),
        v=act(c.R, c.W, c.HV, c.V),
        raw_gate=raw_gate,
        raw_beta=act(c.R, c.W, c.HV),
    )
    out["A_log"] = rng.normal(size=(c.HV,)).astype(np.float32) * 0.5 if c.rate else None
    out["dt_bias"] = rng.normal(size=(c.HV, c.K)).astype(np.float32) - 2.0
    return out


def make_pool(case: Case, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(case.N, case.HV, case.V, case.K)).astype(np.float32)
    return np.asarray(jnp.asarray(x, case.state).astype(jnp.float32))


def log_decay(raw, A_log, dt_bias, bound):
    x = raw.astype(np.float64) + dt_bias
    rate = np.ones((dt_bias.shape[0], 1)) if A_log is None else np.exp(A_log.astype(np.float64))[:, None]
    if bound is None:
        return -rate * np.logaddexp(0, x)
    return bound / (1 + np.exp(-rate * x))


def run_row(state, x, r, tokens, case):
    """Token by token in fp64: (outputs [n,HV,V], corrections [n,HV,V], states after each token)."""
    groups = case.HV // case.H
    q = np.repeat(_normalized(x["q"][r].astype(np.float64)) * case.K**-0.5, groups, 1)
    k = np.repeat(_normalized(x["k"][r].astype(np.float64)), groups, 1)
    g = log_decay(x["raw_gate"][r], x["A_log"], x["dt_bias"], case.bound)
    b = 1 / (1 + np.exp(-x["raw_beta"][r].astype(np.float64)))
    state = state.astype(np.float64)
    os, us, states = [], [], [state]
    for t in range(tokens):
        state = state * np.exp(g[t])[:, None, :]
        u = b[t][:, None] * (x["v"][r, t] - np.einsum("hvk,hk->hv", state, k[t]))
        state = state + u[:, :, None] * k[t][:, None, :]
        us.append(u)
        os.append(np.einsum("hvk,hk->hv", state, q[t]))
        states.append(state)
    return os, us, states


def arrays(x, case: Case, lengths=None):
    """To device arrays; with ``lengths``, everything at or past them becomes NaN."""
    out = {}
    for name, value in x.items():
        if value is None:
            out[name] = None
            continue
        if name in ("A_log", "dt_bias"):
            out[name] = jnp.asarray(value)
            continue
        value = value.copy()
        if lengths is not None:
            for r, n in enumerate(lengths):
                value[r, n:] = np.nan
        out[name] = jnp.asarray(value, case.dtype)
    return out


def poisoned(pool, case: Case, live):
    pool = pool.copy()
    for slot in range(case.N):
        if slot not in live:
            pool[slot] = np.nan
    return jnp.asarray(pool, case.state)


def inputs_of(a):
    return a["q"], a["k"], a["v"], a["raw_gate"], a["raw_beta"], a["A_log"], a["dt_bias"]


class Report(dict):
    def worst(self, name, value):
        self[name] = max(self.get(name, 0.0), value)


def untouched(before, after, written):
    before, after = (
        np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32))
        for x in (before, after)
    )
    for slot in range(before.shape[0]):
        if slot not in written:
            assert (before[slot] == after[slot]).all(), f"slot {slot} changed"


def layout(case: Case):
    """Slots and lengths with null and empty rows where there are enough rows."""
    slots = np.array([2 + i for i in range(case.R)])
    lengths = np.array([case.W - (i * 3) % case.W for i in range(case.R)])
    if case.R > 1:
        slots[1] = 0
    if case.R > 3:
        lengths[3] = 0
    return slots, lengths


def check_verify(module, case: Case, **options):
    """-> worst relative RMS of each result; raises where something is wrong outright."""
    x, pool = make(case), make_pool(case)
    slots, lengths = layout(case)
    live = {int(s) for s in slots if s}
    a = arrays(x, case, lengths)
    fn = jax.jit(lambda a, p, s, n: module.verify(*inputs_of(a), case.bound, p, s, n, **options))
    o, u, key, raw = fn(a, poisoned(pool, case, live), jnp.asarray(slots, jnp.int32), jnp.asarray(lengths, jnp.int32))
    return compare_window(case, x, {r: pool[s] for r, s in enumerate(slots)}, slots, lengths, o, u, key, raw)


def compare_window(case, x, states, slots, lengths, o, u, key, raw):
    expected_o = np.zeros((case.R, case.W, case.HV, case.V))
    expected_u = np.zeros((case.R, case.HV, case.W, case.V))
    expected_k, expected_g = np.zeros(key.shape), np.zeros(raw.shape)
    for r, slot in enumerate(slots):
        n = int(lengths[r]) if slot else 0
        os, us, _ = run_row(states[r], x, r, n, case)
        for t in range(n):
            expected_o[r, t], expected_u[r, :, t] = os[t], us[t]
            expected_k[r, :, t], expected_g[r, :, t] = x["k"][r, t], x["raw_gate"][r, t]
    got_o, got_u = np.asarray(o.astype(jnp.float32)), np.asarray(u)
    assert (got_o[expected_o == 0] == 0).all()
    assert (got_u[expected_u == 0] == 0).all()
    assert (np.asarray(key.astype(jnp.float32)) == expected_k).all()
    assert (np.asarray(raw.astype(jnp.float32)) == expected_g).all()
    return Report(o=rms(got_o, expected_o), u=rms(got_u, expected_u))


def _records(case, x, slots, lengths, states):
    u = np.full((case.R, case.HV, case.W, case.V), 0.0, np.float32)
    for r, slot in enumerate(slots):
        if slot:
            _, us, _ = run_row(states[r], x, r, int(lengths[r]), case)
            for t, value in enumerate(us):
                u[r, :, t] = value
    key = np.moveaxis(x["k"], 1, 2).copy()
    raw = np.moveaxis(x["raw_gate"], 1, 2).copy()
    return u, key, raw


def check_commit(module, case: Case, layers=2, boundaries=False, **options):
    report = Report()
    slots, lengths = layout(case)
    n = np.array(
        [max(int(length) - (r % 2), 0) if s else 0 for r, (s, length) in enumerate(zip(slots, lengths, strict=False))]
    )
    final = np.where(n > 0, slots if not boundaries else slots + case.R, 0)
    boundary_n = np.where(n > 2, 2, 0)
    boundary = np.where(boundary_n > 0, slots, 0)
    source = np.where(n > 0, slots, 0)
    live = {int(s) for s in source if s}
    data = [(make(dataclasses.replace(case, seed=layer)), make_pool(case, 5 + layer)) for layer in range(layers)]
    records = [_records(case, x, slots, lengths, {r: p[s] for r, s in enumerate(slots)}) for x, p in data]
    before = jnp.stack([poisoned(p, case, live) for _, p in data])

    def stack(i, dtype):
        value = np.stack([rec[i] for rec in records])
        for r in range(case.R):
            value[:, r, :, int(n[r]) :] = np.nan
        return jnp.asarray(value, dtype)

    A_log = None if data[0][0]["A_log"] is None else jnp.stack([jnp.asarray(x["A_log"]) for x, _ in data])
    bias = jnp.stack([jnp.asarray(x["dt_bias"]) for x, _ in data])
    plan = [n, source, final] + ([boundary, boundary_n] if boundaries else [])
    plan = [jnp.asarray(p, jnp.int32) for p in plan]

    def fn(pool, u, key, raw, A_log, bias, plan):
        ends = plan[3:] if boundaries else (None, None)
        return module.commit(pool, u, key, raw, A_log, bias, case.bound, *plan[:3], *ends, **options)

    after = jax.jit(fn)(before, stack(0, jnp.float32), stack(1, case.dtype), stack(2, case.dtype), A_log, bias, plan)
    for layer, (x, p) in enumerate(data):
        written = set()
        for r in range(case.R):
            if not n[r]:
                continue
            _, _, states = run_row(p[slots[r]], x, r, int(n[r]), case)
            targets = [(final[r], n[r])] + ([(boundary[r], boundary_n[r])] if boundaries and boundary[r] else [])
            for slot, count in targets:
                written.add(int(slot))
                report.worst("state", rms(after[layer, int(slot)].astype(jnp.float32), states[int(count)]))
        untouched(before[layer], after[layer], written)
    return report


def check_fold(module, case: Case, **options):
    previous, x, pool = make(dataclasses.replace(case, seed=7)), make(case), make_pool(case)
    if case.R > 2 and x["A_log"] is not None:
        previous["A_log"] = x["A_log"]
    previous["A_log"], previous["dt_bias"] = x["A_log"], x["dt_bias"]
    slots, lengths = layout(case)
    everywhere = np.array([2 + i for i in range(case.R)])
    n = np.array([(case.W - 1 - r) % (case.W + 1) for r in range(case.R)])
    if case.R > 2:
        n[2] = 0
    source = np.where(n > 0, everywhere, 0)
    moved = np.where(np.arange(case.R) % 2 == 0, everywhere, everywhere + case.R)
    final = np.where(n > 0, moved, 0)
    slots = np.where(slots > 0, np.where(n > 0, final, slots), 0)
    live = {int(s) for s in source if s} | {int(s) for r, s in enumerate(slots) if s and not n[r]}
    u, key, raw = _records(
        case, previous, everywhere, np.full(case.R, case.W), {r: pool[s] for r, s in enumerate(everywhere)}
    )
    for r in range(case.R):
        for part in (u, key, raw):
            part[r, :, int(n[r]) :] = np.nan
    before = poisoned(pool, case, live)
    a = arrays(x, case, lengths)
    ints = [jnp.asarray(p, jnp.int32) for p in (n, source, final, slots, lengths)]

    def fn(a, pool, u, key, raw, ints):
        return module.verify_after_commit(*inputs_of(a), case.bound, pool, u, key, raw, *ints, **options)

    o, new_u, new_key, new_raw, after = jax.jit(fn)(
        a, before, jnp.asarray(u), jnp.asarray(key, case.dtype), jnp.asarray(raw, case.dtype), ints
    )
    states, written, report = {}, set(), Report()
    for r in range(case.R):
        if n[r]:
            _, _, run = run_row(pool[everywhere[r]], previous, r, int(n[r]), case)
            states[r] = run[int(n[r])]
            written.add(int(final[r]))
            report.worst("state", rms(after[int(final[r])].astype(jnp.float32), states[r]))
            if case.state == "bfloat16":
                states[r] = np.asarray(after[int(final[r])].astype(jnp.float32))
        else:
            states[r] = pool[slots[r]]
    untouched(before, after, written)
    report.update(compare_window(case, x, states, slots, lengths, o, new_u, new_key, new_raw))
    return report


def check_decode(module, case: Case, **options):
    x, pool = make(case), make_pool(case)
    slots, _ = layout(case)
    live = {int(s) for s in slots if s}
    a = arrays(x, case)
    first = {name: value if name in ("A_log", "dt_bias") else value[:, 0] for name, value in a.items()}
    before = poisoned(pool, case, live)
    fn = jax.jit(lambda a, p, s: module.decode(*inputs_of(a), case.bound, p, s, **options))
    o, after = fn(first, before, jnp.asarray(slots, jnp.int32))
    report = Report()
    got = np.asarray(o.astype(jnp.float32))
    expected = np.zeros(got.shape)
    for r, slot in enumerate(slots):
        if slot:
            os, _, states = run_row(pool[slot], x, r, 1, case)
            expected[r] = os[0]
            report.worst("state", rms(after[int(slot)].astype(jnp.float32), states[1]))
        else:
            assert (got[r] == 0).all()
    untouched(before, after, live)
    report["o"] = rms(got, expected)
    return report


CASES = {
    "plain": Case(),
    "bounded": Case(bound=-5.0, rate=False),
    "strong": Case(strong=True),
    "fp32": Case(dtype="float32"),
    "groups": Case(H=1, HV=2, K=128, V=64),
    "wide": Case(R=1, K=64, V=128),
    "short": Case(W=3, N=12),
    "long": Case(W=12),
    "bf16 state": Case(state="bfloat16"),
}
