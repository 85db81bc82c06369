"""Acceptance: greedy rows exactly, ragged and padded drafts, bad logits, mixtures, synthetic rates, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax.speculate.rejection import accept
from kda_jax.speculate.sampling import row_keys

ROWS, DRAFTS, VOCAB = 4, 3, 5
METHODS = ("standard", "block")
_compiled = jax.jit(accept, static_argnames=("method", "synthetic_rates"))


def accept_jit(logits, drafts, count, probs, keys, *options, **static):
    """``accept``, compiled once for arguments of one shape however they were made (numpy arrays have no weak types)."""
    arrays = [None if x is None else np.asarray(x) for x in (logits, drafts, count, probs)]
    return _compiled(*arrays, keys, *(None if x is None else np.asarray(x) for x in options), **static)


def greedy_reference(logits, drafts, count):
    """What plain greedy decoding emits along the drafts: (accepted, tokens, nan)."""
    tokens = []
    for i in range(len(drafts) + 1):
        if not np.isfinite(logits[i].max()):
            return i, tokens, True
        tokens.append(int(np.argmax(logits[i])))
        if i >= count or drafts[i] != tokens[-1]:
            return i, tokens, False
    return len(drafts), tokens, False


window = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, -np.inf]), min_size=VOCAB, max_size=VOCAB),
    min_size=DRAFTS + 1,
    max_size=DRAFTS + 1,
)
greedy_row = st.tuples(
    window,
    st.lists(st.sampled_from(["right", -1, 0, 1, 2, VOCAB]), min_size=DRAFTS, max_size=DRAFTS),
    st.integers(0, DRAFTS),
    st.sampled_from([None, None, 0, 1, 2, 3]),
)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(greedy_row, min_size=ROWS, max_size=ROWS),
    st.sampled_from([("standard", False), ("block", True)]),
    st.booleans(),
)
def test_greedy_rows_emit_what_plain_greedy_does(rows, how, with_sampled_row):
    method, probabilistic = how
    logits = np.array([r[0] for r in rows], np.float32)
    drafts = np.zeros((ROWS, DRAFTS), np.int32)
    for b, (_, wanted, _, bad_row) in enumerate(rows):
        for i, d in enumerate(wanted):
            drafts[b, i] = np.argmax(logits[b, i]) if d == "right" else d
        if bad_row is not None:
            logits[b, bad_row, b] = np.nan
    count = np.array([r[2] for r in rows], np.int32)
    temperature = np.zeros(ROWS, np.float32)
    temperature[-1] = with_sampled_row
    probs = np.full((ROWS, DRAFTS, VOCAB), 1 / VOCAB, np.float32) if probabilistic else None
    out = accept_jit(logits, drafts, count, probs, row_keys(jax.random.key(0), ROWS), temperature, method=method)
    for b in range(ROWS - with_sampled_row):
        accepted, tokens, nan = greedy_reference(logits[b], drafts[b], count[b])
        assert out.num_accepted_drafts[b] == accepted
        assert out.num_emitted[b] == len(tokens)
        assert out.tokens[b].tolist() == tokens + [0] * (DRAFTS + 1 - len(tokens))
        assert bool(out.nan[b]) == nan


def example(seed=0, rows=6, m=4, vocab=11, probabilistic=True):
    """Arguments of ``accept``: rows greedy and sampled, shaped and not, drafts of every number and with -1 inside."""
    a, b, c, d = jax.random.split(jax.random.key(seed), 4)
    logits = jax.random.normal(a, (rows, m + 1, vocab))
    probs = jax.nn.softmax(jax.random.normal(b, (rows, m, vocab)))
    drafts = jax.random.categorical(c, jnp.log(probs)).astype(jnp.int32)
    # half of them what greedy would emit
    drafts = jnp.where(jax.random.bernoulli(d, 0.5, drafts.shape), jnp.argmax(logits[:, :-1], -1), drafts)
    drafts = drafts.at[1, 1].set(-1)
    count = jnp.arange(rows) % (m + 1)
    temperature = jnp.where(jnp.arange(rows) % 3 == 0, 0.0, 0.8)
    top_k = jnp.where(jnp.arange(rows) % 2 == 0, 4, vocab)
    return [logits, drafts, count, probs if probabilistic else None, row_keys(a, rows), temperature, top_k, None]


@pytest.mark.parametrize("probabilistic", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_rows_outcome_does_not_depend_on_its_batch(method, probabilistic):
    arguments = example(probabilistic=probabilistic)
    together = accept_jit(*arguments, method=method)
    for b in range(6):
        # in another place, in other company
        others = jnp.roll(jnp.arange(6), b).at[2].set(b)
        again = accept_jit(*(None if x is None else x[others] for x in arguments), method=method)
        assert jax.tree.map(lambda x, b=b: x[b].tolist(), together) == jax.tree.map(lambda x: x[2].tolist(), again)


@pytest.mark.parametrize("probabilistic", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_what_lies_past_the_drafts_is_not_looked_at(method, probabilistic):
    arguments = example(probabilistic=probabilistic)
    logits, drafts, count, probs = arguments[:4]
    ends = jnp.minimum(count, jnp.argmax(jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=-1) < 0, axis=1))
    past = jnp.arange(drafts.shape[1])[None] >= ends[:, None]
    expected = accept_jit(*arguments, method=method)
    arguments[0] = logits.at[:, 1:].set(jnp.where(past[..., None], jnp.nan, logits[:, 1:]))
    # a draft of -1 ends them as well as the number does
    for filler, number in ((-1, drafts.shape[1]), (3, ends), (-1, ends)):
        arguments[1], arguments[2] = jnp.where(past, filler, drafts), jnp.broadcast_to(number, count.shape)
        if probs is not None:
            arguments[3] = jnp.where(past[..., None], jnp.nan, probs)
        got = accept_jit(*arguments, method=method)
        assert jax.tree.map(lambda x: x.tolist(), got) == jax.tree.map(lambda x: x.tolist(), expected)
    assert (expected.num_accepted_drafts <= ends).all()


@pytest.mark.parametrize("method", METHODS)
def test_bad_logits_in_sampled_rows(method):
    # drafts that always stand, then logits that are not numbers: the drafts stand, nothing follows
    logits = jnp.full((5, 4, 6), -jnp.inf).at[:, :, 2].set(0.0)
    drafts = jnp.full((5, 3), 2)
    for b in range(4):
        logits = logits.at[b, b].set(jnp.array([0, 0, jnp.nan, 0, 0, 0]))
    arguments = logits, drafts, jnp.full(5, 3), None, row_keys(jax.random.key(0), 5), jnp.ones(5)
    out = accept_jit(*arguments, method=method)
    assert out.num_accepted_drafts.tolist() == [0, 1, 2, 3, 3]
    assert out.nan.tolist() == [True] * 4 + [False]
    assert out.num_emitted.tolist() == [0, 1, 2, 3, 4]
    assert (out.tokens[:4].sum(1) == 2 * jnp.arange(4)).all()
    # a draft that can't stand: what lies behind it is never met
    out = accept_jit(logits, drafts.at[:, 0].set(1), *arguments[2:], method=method)
    assert out.nan.tolist() == [True] + [False] * 4
    assert out.tokens[1:].tolist() == [[2, 0, 0, 0]] * 4


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("method", METHODS)
def test_probabilities_that_are_not_numbers_end_the_drafts(method, place):
    """As if there were no draft from there on, in sampled rows; greedy rows and others don't look."""
    logits, drafts, count, probs, keys, temperature, *shape = example(rows=12)
    count = jnp.full_like(count, drafts.shape[1])
    arguments = keys, temperature, *shape
    want = accept_jit(logits, drafts, jnp.where(temperature > 0, place, count), probs, *arguments, method=method)
    got = accept_jit(logits, drafts, count, probs.at[:, place, 3].set(jnp.nan), *arguments, method=method)
    jax.tree.map(np.testing.assert_array_equal, want, got)
    assert not got.nan.any()


@pytest.mark.parametrize("method", METHODS)
def test_impossible_drafts_never_stand(method):
    # the drafter is sure of what the target excludes, or denies having drafted what it did
    rows = 2000
    logits = jnp.zeros((rows, 3, 4)).at[:, :, 3].set(-jnp.inf)
    one_hot = jnp.broadcast_to(jax.nn.one_hot(3, 4), (rows, 2, 4))
    arguments = jnp.full((rows, 2), 3), jnp.full(rows, 2), None, row_keys(jax.random.key(0), rows), jnp.ones(rows)
    for probs in (None, one_hot, jnp.broadcast_to(jax.nn.one_hot(0, 4), (rows, 2, 4))):
        out = accept_jit(logits, *arguments[:2], probs, *arguments[3:], method=method)
        assert (out.num_accepted_drafts == 0).all()
        assert (out.tokens[:, 0] < 3).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_certain_target_accepts_and_a_rejected_token_is_not_drawn_again(method):
    rows = 2000
    logits = jnp.array([[[0.0, 1.0, -1.0, -jnp.inf]] * 3] * rows)
    keys = row_keys(jax.random.key(0), rows)
    certain = jnp.full((rows, 3, 4), -jnp.inf).at[:, :, 1].set(0.0)
    drafts, count = jnp.ones((rows, 2), jnp.int32), jnp.full(rows, 2)
    out = accept_jit(certain, drafts, count, None, keys, jnp.ones(rows), method=method)
    assert (out.num_emitted == 3).all()
    out = accept_jit(logits, drafts, count, None, keys, jnp.ones(rows), method=method)
    rejected = out.num_accepted_drafts < 2
    following = jnp.take_along_axis(out.tokens, out.num_accepted_drafts[:, None], 1)[:, 0]
    assert rejected.any()
    assert (~rejected).any()
    assert (following[rejected] != 1).all()
    assert (following[~rejected] == 1).any()


def primitives(jaxpr, inside_cond=False):
    """(name, whether under a ``cond``) of every equation."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, inside_cond
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner, inside_cond or equation.primitive.name == "cond")


@pytest.mark.parametrize("method", METHODS)
def test_greedy_batches_skip_the_work_of_sampled_ones(method):
    arguments = example()
    found = set(primitives(jax.make_jaxpr(lambda *a: accept(*a, method=method))(*arguments).jaxpr))
    costly = {
        name for name, _ in found if name.startswith(("random", "threefry", "exp", "log", "sort", "while", "scan"))
    }
    assert any(name.startswith("random") for name in costly)
    assert all(inside for name, inside in found if name in costly), found


@pytest.mark.parametrize("method", METHODS)
def test_a_window_without_drafts_is_plain_sampling(method):
    arguments = [jnp.ones((2, 1, 4)), jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32), None]
    for temperature in (0.0, 1.0):
        out = accept_jit(*arguments, row_keys(jax.random.key(0), 2), jnp.full(2, temperature), method=method)
        assert out.num_emitted.tolist() == [1, 1]
        assert out.tokens.shape == (2, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_rates(temperature):
    rows, rates = 20_000, (0.75, 0.75, 0.25)
    logits = jnp.zeros((rows, 4, 3)).at[..., 1].set(9.0)
    count = jnp.where(jnp.arange(rows) < rows // 2, 3, 2)
    drafts = jnp.full((rows, 3), 2)
    keys = row_keys(jax.random.key(0), rows)
    out = accept_jit(
        logits, drafts, count, None, keys, jnp.full(rows, temperature), method="synthetic", synthetic_rates=rates
    )
    accepted = np.asarray(out.num_accepted_drafts)
    reached = np.stack([accepted >= i for i in (1, 2, 3)], axis=1)
    np.testing.assert_allclose(reached[: rows // 2].mean(0), rates, atol=0.025)
    np.testing.assert_allclose(reached[rows // 2 :].mean(0), (0.75, 0.75, 0), atol=0.025)
    following = np.asarray(out.tokens)[np.arange(rows), accepted]
    assert (following == 1).mean() > 0.999
    assert (np.asarray(out.tokens)[:, 0] == 2).mean() == pytest.approx(0.75, abs=0.025)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, jnp.zeros((6, 11)), r"logits must be floating \[B, m \+ 1, V\], got float32 \[6, 11\]"),
        (0, jnp.zeros((6, 5, 11), jnp.int32), "logits must be floating"),
        (1, jnp.zeros((6, 5), jnp.int32), r"drafts must have shape \[6, 4\] .* got \[6, 5\]"),
        (1, jnp.zeros((6, 4)), "drafts must be integers, got float32"),
        (2, jnp.zeros((5,), jnp.int32), r"num_draft must have shape \[6\]"),
        (3, jnp.zeros((6, 5, 11)), r"draft_probs must have shape \[6, 4, 11\]"),
        (4, row_keys(jax.random.key(0), 2), r"keys must have shape \[6\]"),
        (5, jnp.float32(1), r"temperature must have shape \[6\]"),
        (6, jnp.ones((6, 5), jnp.int32), r"top_k must have shape \[6\]"),
        (7, jnp.ones((1,)), r"top_p must have shape \[6\]"),
    ],
)
def test_wrong_arguments_are_named(index, value, message):
    arguments = example()
    arguments[index] = value
    with pytest.raises(ValueError, match=message):
        accept(*arguments)


def test_wrong_methods_are_named():
    with pytest.raises(ValueError, match="method must be one of 'standard', 'block', 'synthetic', got 'greedy'"):
        accept(*example(), method="greedy")
    with pytest.raises(ValueError, match="synthetic_rates goes with method 'synthetic'"):
        accept(*example(), method="synthetic")
    with pytest.raises(ValueError, match="synthetic_rates goes with method 'synthetic'"):
        accept(*example(), synthetic_rates=(1.0,) * 4)
    with pytest.raises(ValueError, match="synthetic_rates must have 4 entries, got 3"):
        accept(*example(), method="synthetic", synthetic_rates=(1.0,) * 3)
