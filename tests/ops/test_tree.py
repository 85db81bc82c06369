"""Windows that branch: every path of a tree against the sequential oracle run along that path alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax import ops
from kda_jax.ops.tree import chain_parents, paths
from tests import oracle
from tests.ops.harness import assert_pool, assert_same_bits, assert_zero_past, compiled, jitted
from tests.ops.inputs import BF16, DIMS, F32, MORE_DIMS, gate, nan_past, pool, states, tokens
from tests.ops.test_decode import bounded_or_not
from tests.tolerances import assert_close, tolerance

SLOTS = np.array([3, 0, 6, 1, 7, 4, 2], np.int32)
R, N, WC, C = len(SLOTS), 9, 4, 13


def random_parents(rng, rows, window):
    """Any tree: each row hangs from an earlier one."""
    out = np.full((rows, window), -1, np.int32)
    for i in range(1, window):
        out[:, i] = rng.integers(0, i, rows)
    return out


def path_of(parents, row):
    """The rows from the anchor to ``row``, a list."""
    out = [row]
    while parents[out[-1]] >= 0:
        out.append(int(parents[out[-1]]))
    return out[::-1]


def draw(seed, W, lengths, dims=DIMS, dtype=F32, lower_bound=None):
    g = gate(seed, dims, lower_bound)
    x = tokens(seed, R, W, dims, dtype, g, bounded_or_not(lower_bound))
    return [nan_past(a, np.where(SLOTS == 0, 0, lengths)) for a in x], g


def along(x, row, path):
    return [np.asarray(a)[row : row + 1, path] for a in x]


def check_verify(out, x, g, pool, parents, lengths, dtype):
    o, records = out
    live = np.where(SLOTS == 0, 0, lengths)
    assert o.dtype == dtype
    assert_zero_past(o, live, "o")
    assert_zero_past(np.moveaxis(records.correction, 2, 1), live, "correction")
    for r in np.flatnonzero(live):
        for i in range(live[r]):
            path = path_of(parents[r], i)
            o_ref, want = oracle.verify(*along(x, r, path), g, pool, SLOTS[r : r + 1], [len(path)])
            what = f"row {r}, window row {i}"
            assert_close(o[r, i], o_ref[0, -1], tolerance(dtype).output, f"o, {what}")
            # an element that cancels to almost nothing is held to the size of its window's corrections
            scale = np.sqrt(np.mean(np.square(want.correction[0])))
            error = np.sqrt(np.mean((np.asarray(records.correction)[r, :, i] - want.correction[0, :, -1]) ** 2))
            assert error <= tolerance(dtype).state * scale, f"correction, {what}"
        np.testing.assert_array_equal(
            np.asarray(records.key)[r, :, : live[r]], np.moveaxis(x[1], 1, 2)[r, :, : live[r]]
        )


@pytest.mark.parametrize("W", [1, 2, 5, 8])
def test_verify_follows_each_path(W):
    rng = np.random.default_rng(W)
    parents = random_parents(rng, R, W)
    lengths = np.minimum(np.array([W, W, 1, 0, W, 2, W - 1]), W).astype(np.int32)
    x, g = draw(W, W, lengths)
    pool = states(1, N, nan_slots=(0, 5, 8))
    before = pool.copy()
    out = jitted("kda_verify")(*x, g.params(ops), pool, SLOTS, lengths, parents=parents)
    check_verify(out, x, g, pool, parents, lengths, F32)
    assert_same_bits(pool, before, "the pool is only read")


@pytest.mark.parametrize("dims", MORE_DIMS, ids=str)
@pytest.mark.parametrize(("dtype", "lower_bound"), [(F32, -5.0), (BF16, None)], ids=str)
def test_dtypes_gates_and_dims(dims, dtype, lower_bound):
    parents, lengths = random_parents(np.random.default_rng(3), R, 6), np.full(R, 6, np.int32)
    x, g = draw(2, 6, lengths, dims, dtype, lower_bound)
    pool = states(2, N, dims)
    out = jitted("kda_verify")(*x, g.params(ops), pool, SLOTS, lengths, parents=parents)
    check_verify(out, x, g, pool, parents, lengths, dtype)


@pytest.mark.slow
def test_a_wide_window():
    parents, lengths = random_parents(np.random.default_rng(4), R, 20), np.full(R, 20, np.int32)
    x, g = draw(3, 20, lengths)
    pool = states(3, N)
    out = jitted("kda_verify")(*x, g.params(ops), pool, SLOTS, lengths, parents=parents)
    check_verify(out, x, g, pool, parents, lengths, F32)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("W", [1, 5, 8, 16])
def test_a_chain_is_a_tree_bit_for_bit(W, dtype):
    lengths = np.minimum(np.array([W, W, 1, 0, W, 2, W - 1]), W).astype(np.int32)
    x, g = draw(W, W, lengths, dtype=dtype)
    chain = np.asarray(chain_parents(R, W))
    arguments = *x, g.params(ops), states(1, N), SLOTS, lengths
    plain, tree = jitted("kda_verify")(*arguments), jitted("kda_verify")(*arguments, parents=chain)
    assert_same_bits(plain[0], tree[0], "o")
    for name in ("correction", "key", "raw_gate"):
        assert_same_bits(getattr(plain[1], name), getattr(tree[1], name), name)
    inputs, weight, history = conv_arguments(W, W, dtype)
    arguments = inputs, weight, history, SLOTS, lengths
    assert_same_bits(jitted("conv_step")(*arguments), jitted("conv_step")(*arguments, parents=chain), "convolution")


def test_a_bad_token_stays_on_its_paths():
    parents = np.tile(np.array([[-1, 0, 0, 1, 2, 4]], np.int32), (R, 1))
    lengths = np.full(R, 6, np.int32)
    x, g = draw(1, 6, lengths)
    pool = states(1, N)
    good, _ = jitted("kda_verify")(*x, g.params(ops), pool, SLOTS, lengths, parents=parents)
    x[2][:, 2] = np.nan
    o, records = jitted("kda_verify")(*x, g.params(ops), pool, SLOTS, lengths, parents=parents)
    live = SLOTS > 0
    assert np.isnan(o[live, 2]).all()
    assert np.isnan(np.asarray(records.correction)[live][:, :, 2]).all()
    for i in (0, 1, 3):
        np.testing.assert_array_equal(o[:, i], good[:, i])


# --- convolution -----------------------------------------------------------------------------------------------------


def conv_arguments(seed, W, dtype=F32):
    r = np.random.default_rng(seed)
    x = r.normal(size=(R, W, C)).astype(dtype)
    return x, r.normal(size=(C, WC)).astype(dtype), pool(seed, (N, WC - 1, C), (0, 5, 8), dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("W", [1, 3, 7])
def test_the_convolution_follows_each_path(W, dtype):
    parents = random_parents(np.random.default_rng(W), R, W)
    lengths = np.minimum(np.array([W, W, 1, 0, W, 2, W - 1]), W).astype(np.int32)
    x, weight, history = conv_arguments(W, W, dtype)
    x = nan_past(x, np.where(SLOTS == 0, 0, lengths))
    y = jitted("conv_step")(x, weight, history, SLOTS, lengths, parents=parents)
    live = np.where(SLOTS == 0, 0, lengths)
    assert y.dtype == dtype
    assert_zero_past(y, live, "y")
    for r in np.flatnonzero(live):
        for i in range(live[r]):
            path = path_of(parents[r], i)
            want = oracle.conv_step(x[r : r + 1, path], weight, history, SLOTS[r : r + 1], [len(path)])
            assert_close(y[r, i], want[0, -1], tolerance(dtype).output, f"row {r}, window row {i}")


# --- commit along a path ---------------------------------------------------------------------------------------------


def accepted_paths(parents, rng, lengths):
    """A path down each row's tree (random ends, cut at random), padded with any rows; how many of its rows stand."""
    W = parents.shape[1]
    path, count = rng.integers(0, W, parents.shape).astype(np.int32), np.zeros(len(parents), np.int32)
    for r, n in enumerate(lengths):
        if n > 0:
            rows = path_of(parents[r], int(rng.integers(0, n)))
            path[r, : len(rows)], count[r] = rows, len(rows)
    return path, count


@pytest.mark.parametrize("layered", [False, True])
def test_commit_of_a_path_is_decoding_along_it(layered):
    W, rng = 7, np.random.default_rng(5)
    parents = random_parents(rng, R, W)
    lengths = np.array([W, W, 1, 0, W, 2, W - 1], np.int32)
    path, count = accepted_paths(parents, rng, np.where(SLOTS == 0, 0, lengths))
    x, g = draw(5, W, lengths)
    inputs, _, history = conv_arguments(5, W)
    inputs = nan_past(inputs, np.where(SLOTS == 0, 0, lengths))
    state = states(5, N, nan_slots=(0, 5, 8))

    def step(x, inputs, gate, state, history, parents, path, count):
        _, records = ops.kda_verify(*x, gate, state, SLOTS, lengths, parents=parents)
        plan = ops.plan_commit(count, lengths, SLOTS)
        arguments = (state, history, records, inputs, gate)
        if layered:
            arguments = _stack(arguments)
        state, history, records, inputs, gate = arguments
        records, inputs = ops.gather_path(records, path), ops.gather_path(inputs, path)
        return ops.kda_commit(state, records, gate, plan), ops.conv_commit(history, inputs, plan)

    new_state, new_history = compiled(step)(x, inputs, g.params(ops), state, history, parents, path, count)
    written, moved = {}, {}
    for r in np.flatnonzero(count):
        n = count[r]
        plan = oracle.plan_commit([n], [n], SLOTS[r : r + 1])
        rows = path[r, :n]
        written |= oracle.commit(state, *along(x, r, rows), g, plan)
        moved |= oracle.conv_commit(history, inputs[r : r + 1, rows], plan)
    for layer in range(2) if layered else (slice(None),):
        assert_pool(new_state[layer], state, written, tolerance(F32).state, "states")
        assert_pool(new_history[layer], history, moved, 0.0, "histories")


def _stack(tree):
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


# --- paths, errors ---------------------------------------------------------------------------------------------------


paths_jit = compiled(paths)


@settings(max_examples=60)
@given(st.sampled_from([1, 2, 9]), st.integers(0, 2**32 - 1))
def test_paths(window, seed):
    parents = random_parents(np.random.default_rng(seed), 3, window)
    found = np.asarray(paths_jit(parents))
    for r in range(3):
        for i in range(window):
            assert np.flatnonzero(found[r, i]).tolist() == path_of(parents[r], i)


def test_errors():
    W = 3
    x, g = draw(1, W, np.full(R, W))
    arguments = *x, g.params(ops), states(1, N), SLOTS, np.full(R, W, np.int32)
    inputs, weight, history = conv_arguments(1, W)
    conv = inputs, weight, history, SLOTS, np.full(R, W, np.int32)
    good = np.asarray(chain_parents(R, W))
    for op, values in ((ops.kda_verify, arguments), (ops.conv_step, conv)):
        with pytest.raises(ValueError, match=r"parents must have shape \[R, W\]"):
            op(*values, parents=good[:, :2])
        with pytest.raises(ValueError, match="parents must have an integer dtype"):
            op(*values, parents=good.astype(F32))
        with pytest.raises(ValueError, match=r"implementation='pallas': .* parents .* XLA form only"):
            op(*values, parents=good, implementation="pallas")
    _, records = jitted("kda_verify")(*arguments)
    with pytest.raises(ValueError, match=r"records.correction must have shape \[R, H, W, C\] with R=6"):
        ops.gather_path(records, good[:6])
    with pytest.raises(ValueError, match=r"records must have shape \[R, W, C\] with W=2"):
        ops.gather_path(inputs, good[:, :2])
    with pytest.raises(ValueError, match="path must have an integer dtype"):
        ops.gather_path(inputs, good.astype(F32))
