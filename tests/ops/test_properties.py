"""Properties that hold for every draw: acceptance patterns, slots, lengths, decays, ways to cut a prompt."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_pool, assert_same_bits, calls, jitted
from tests.ops.inputs import DIMS, F32, gate, rng, sequence, states, tokens
from tests.tolerances import assert_close, tolerance

OPS = ("kda_chunked", "kda_recurrent", "conv_prefill")
R, W, N = 4, 6, 10
SEEDS = st.integers(0, 2**16)

window_rows = st.tuples(
    st.permutations(range(1, N)),  # distinct slots
    st.lists(st.booleans(), min_size=R, max_size=R),  # null or not
    st.lists(st.integers(0, W), min_size=R, max_size=R),  # lengths
    st.lists(st.integers(-1, W + 2), min_size=R, max_size=R),  # accepted, out of range too
)
# Log decay of every token and channel of a window: any mix of weak and very strong
decays = st.lists(st.sampled_from([-80.0, -8.0, -1.0, -0.1, -0.01, -0.001]), min_size=W, max_size=W)


@settings(max_examples=30)
@given(seed=SEEDS, rows=window_rows, decays=decays, lower_bound=st.sampled_from([None, -5.0]))
@calls("kda_verify", "kda_commit", "kda_decode")
def test_verify_then_commit_is_decode(implementation, seed, rows, decays, lower_bound):
    """For any acceptance: the pool is the one that token-by-token decode of the accepted tokens leaves."""
    slots, live, lengths, accepted = rows
    slots = np.where(live, slots[:R], 0).astype(np.int32)
    lengths, accepted = np.array(lengths, np.int32), np.array(accepted, np.int32)
    g = gate(seed, DIMS, lower_bound)
    if lower_bound is not None:
        decays = np.maximum(decays, -4.99)
    drawn = {"drawn": lambda r, shape: np.broadcast_to(np.array(decays)[:, None, None], shape)}
    q, k, v, raw_gate, raw_beta = tokens(seed, R, W, DIMS, F32, g, drawn)
    pool = states(seed, N, nan_slots=(0, *(s for s in range(1, N) if s not in slots)))
    params = g.params(ops)

    o, records = jitted("kda_verify", implementation=implementation)(
        q, k, v, raw_gate, raw_beta, params, pool, slots, lengths
    )
    plan = jitted("plan_commit")(accepted, lengths, slots)
    committed = jitted("kda_commit", implementation=implementation)(pool, records, params, plan)

    count = np.where(slots == 0, 0, np.clip(accepted, 0, lengths))
    decoded, decode = pool, jitted("kda_decode", implementation=implementation)
    for t in range(count.max()):
        row = np.where(t < count, slots, 0).astype(np.int32)
        one, decoded = decode(q[:, t], k[:, t], v[:, t], raw_gate[:, t], raw_beta[:, t], params, decoded, row)
        if (row != 0).any():
            assert_close(np.asarray(o)[row != 0, t], np.asarray(one)[row != 0], tolerance(F32).output, f"o, token {t}")

    changed = [s for s, n in zip(slots, count, strict=True) if n > 0]
    assert_pool(committed, pool, {s: np.asarray(decoded)[s] for s in changed}, tolerance(F32).state)
    assert_pool(committed, pool, oracle.commit(pool, q, k, v, raw_gate, raw_beta, g, plan), tolerance(F32).state)


@settings(max_examples=20)
@given(seed=SEEDS, cuts=st.lists(st.integers(0, 48), min_size=0, max_size=3), strong=st.booleans())
@pytest.mark.parametrize("form", ["kda_chunked", "kda_recurrent"])
def test_any_cut_of_a_prompt(implementation, form, seed, cuts, strong):
    """Prefill in pieces, each padded to 48 with NaN, is prefill in one: outputs and state."""
    T = 48
    regimes = {"spikes": lambda r, shape: np.where(r.random(shape) < 0.1, -80.0 if strong else -2.0, -0.01)}
    x = sequence(seed, T, decays=regimes)
    o_ref, state_ref = oracle.recurrent(**x)
    state, pieces, ends = x.pop("initial_state"), [], [0, *sorted(cuts), T]
    static = {"chunk_size": 16} if form == "kda_chunked" else {}
    run = jitted(form, implementation=implementation, **static)
    for start, end in itertools.pairwise(ends):
        piece = {name: np.full_like(a, np.nan) for name, a in x.items()}
        for name, a in x.items():
            piece[name][:, : end - start] = a[:, start:end]
        before = state
        o, state = run(**piece, initial_state=state, lengths=np.array([end - start], np.int32))
        pieces.append(np.asarray(o)[:, : end - start])
        if start == end:
            assert_same_bits(state, before, "the state after no token")
    assert_close(np.concatenate(pieces, axis=1), o_ref, tolerance(F32).output, f"o, cut at {ends}")
    assert_close(state, state_ref, tolerance(F32).state, f"state, cut at {ends}")


@settings(max_examples=20)
@given(seed=SEEDS, cuts=st.lists(st.integers(0, 12), min_size=0, max_size=4))
def test_any_cut_of_a_convolution(implementation, seed, cuts):
    T, C, taps = 12, 6, 4
    r = rng(seed)
    x, weight = r.normal(size=(1, T, C)).astype(F32), r.normal(size=(C, taps)).astype(F32)
    y_ref, history_ref = oracle.conv_prefill(x, weight)
    history, pieces, ends = np.zeros((1, taps - 1, C), F32), [], [0, *sorted(cuts), T]
    run = jitted("conv_prefill", implementation=implementation)
    for start, end in itertools.pairwise(ends):
        piece = np.full_like(x, np.nan)
        piece[:, : end - start] = x[:, start:end]
        y, history = run(piece, weight, history=history, lengths=np.array([end - start], np.int32))
        pieces.append(np.asarray(y)[:, : end - start])
    assert_close(np.concatenate(pieces, axis=1), y_ref, tolerance(F32).output, f"y, cut at {ends}")
    assert_same_bits(history, history_ref.astype(F32), "history")


@settings(max_examples=30)
@given(seed=SEEDS, lengths=st.lists(st.integers(0, 40), min_size=3, max_size=3), weak=st.floats(-0.1, -1e-4))
def test_chunked_is_recurrent(implementation, seed, lengths, weak):
    """Any lengths, any pattern of spikes over channels, heads and time, any strength between them."""
    share = (seed % 7) / 10
    regimes = {
        str(i): lambda r, shape: np.where(r.random(shape) < share, -r.uniform(1, 80, shape), weak) for i in range(3)
    }
    x, lengths = sequence(seed, 40, decays=regimes), np.array(lengths, np.int32)
    o_ref, state_ref = oracle.recurrent(**x, lengths=lengths)
    o, state = jitted("kda_chunked", chunk_size=32, implementation=implementation)(**x, lengths=lengths)
    assert_close(o, o_ref, tolerance(F32).output, "o")
    assert_close(state, state_ref, tolerance(F32).state, "state")
