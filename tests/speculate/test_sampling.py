"""Temperature, top-k, top-p, greedy rows and bad rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax.speculate.sampling import best_token, row_keys, sample, shape_logits, step_keys
from tests.speculate.toy import Shape, shaped
from tests.statistics import FALSE_ALARM, p_value, sample_size

ROWS, VOCAB = 4, 7
shape_jit = jax.jit(shape_logits)
sample_jit = jax.jit(sample)

# small integers tie often
row_of_logits = st.lists(st.integers(-3, 3), min_size=VOCAB, max_size=VOCAB)
row_options = st.builds(
    Shape,
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.integers(1, VOCAB + 2),
    st.sampled_from([1e-6, 0.05, 0.31, 0.5, 0.77, 0.93, 1.0]),
)


def columns(options: list[Shape]):
    return (
        jnp.array([o.temperature for o in options], jnp.float32),
        jnp.array([o.top_k for o in options], jnp.int32),
        jnp.array([o.top_p for o in options], jnp.float32),
    )


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(row_of_logits, row_options), min_size=ROWS, max_size=ROWS))
def test_shaped_distribution(rows):
    logits = np.array([r for r, _ in rows], np.float32)
    options = [o for _, o in rows]
    got = np.exp(np.asarray(shape_jit(logits, *columns(options))))
    expected = np.stack([shaped(row, o) for row, o in zip(logits, options, strict=True)])
    np.testing.assert_array_equal(got > 0, expected > 0)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_top_k_keeps_exactly_k_of_equal_logits_lower_ids_first():
    logits = jnp.array([[0.0, 2.0, 1.0, 1.0, 1.0, 2.0, -0.0]])
    for k, kept in ((1, [1]), (2, [1, 5]), (3, [1, 2, 5]), (4, [1, 2, 3, 5]), (6, [0, 1, 2, 3, 4, 5])):
        log_probs = shape_logits(logits, jnp.ones(1), jnp.array([k]))
        assert np.flatnonzero(np.isfinite(log_probs[0])).tolist() == kept


def test_top_p_of_equal_logits_keeps_lower_ids_first():
    log_probs = shape_logits(jnp.zeros((3, 8)), jnp.ones(3), None, jnp.array([0.24, 0.26, 0.99]))
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in log_probs] == [[0, 1], [0, 1, 2], list(range(8))]


def test_against_sorting_over_a_large_vocabulary():
    logits = jax.random.normal(jax.random.key(0), (5, 5000)) * 3
    options = [Shape(1.0, 50, 1.0), Shape(0.7, 5000, 0.9), Shape(1.5, 1000, 0.5), Shape(1.0, 1, 0.1), Shape(1.0, 9999)]
    got = np.exp(np.asarray(shape_jit(logits, *columns(options))))
    for row, values, o in zip(got, np.asarray(logits), options, strict=True):
        expected = shaped(values, o)
        # a token whose cumulative probability meets top_p to rounding may fall on either side
        assert abs((row > 0).sum() - (expected > 0).sum()) <= (o.top_p < 1)
        np.testing.assert_allclose(row, expected, rtol=2e-4, atol=1e-4 if o.top_p < 1 else 1e-7)


def test_options_that_change_nothing_equal_none():
    logits = jax.random.normal(jax.random.key(0), (6, 50)) * 4
    temperature = jnp.array([0.0, 0.5, 1.0, 2.0, 1.0, 0.1])
    plain = shape_logits(logits, temperature)
    np.testing.assert_array_equal(plain, shape_logits(logits, temperature, jnp.full(6, 50), jnp.ones(6)))
    keys = row_keys(jax.random.key(1), 6)
    np.testing.assert_array_equal(
        sample(logits, keys, temperature)[0], sample(logits, keys, temperature, jnp.full(6, 2**31 - 1), jnp.ones(6))[0]
    )


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-10, 1e10, 3e38])
def test_extreme_temperatures_give_a_distribution(temperature):
    logits = jnp.array([[-3e4, 5.0, 6.0, -jnp.inf]])
    log_probs = np.asarray(shape_logits(logits, jnp.full(1, temperature), jnp.array([3]), jnp.array([0.999])))
    assert abs(np.exp(log_probs).sum() - 1) < 1e-5
    assert log_probs[0, 3] == -np.inf
    assert log_probs[0].argmax() == (2 if temperature < 1 else 0)


def test_greedy_rows_take_the_first_of_equals_whatever_the_key_and_options():
    logits = jnp.array([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [-jnp.inf, -jnp.inf, 1.0]])
    for seed in range(5):
        token, bad = sample(logits, row_keys(jax.random.key(seed), 3), jnp.zeros(3), jnp.full(3, 2), jnp.full(3, 0.9))
        assert token.tolist() == [1, 0, 2]
        assert not bad.any()
    assert token.dtype == jnp.int32
    assert bad.dtype == bool


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [(None, None), (2, 0.9)])
def test_bad_rows_are_reported_and_the_others_unharmed(temperature, options):
    good = [0.0, 9.0, 1.0, -jnp.inf]
    logits = jnp.array([good, [0, jnp.nan, 1, 2], [jnp.nan] * 4, good, [jnp.inf, 0, 0, 0], [-jnp.inf] * 4, good])
    keys = row_keys(jax.random.key(0), 7)
    top_k, top_p = (None if o is None else jnp.full(7, o) for o in options)
    token, bad = sample_jit(logits, keys, jnp.full(7, temperature), top_k, top_p)
    assert bad.tolist() == [False, True, True, False, True, True, False]
    assert (np.asarray(token)[np.asarray(bad)] == 0).all()
    np.testing.assert_array_equal(token[~bad], sample(logits, keys, jnp.full(7, 0.01))[0][~bad])


def test_best_token_agrees_with_argmax():
    logits = jnp.round(jax.random.normal(jax.random.key(3), (200, 9)) * 2)
    np.testing.assert_array_equal(best_token(logits)[0], jnp.argmax(logits, -1))


def test_a_rows_token_does_not_depend_on_its_batch():
    rows = 6
    logits = jax.random.normal(jax.random.key(0), (rows, 20))
    keys = row_keys(jax.random.key(1), rows)
    options = (
        jnp.array([0.0, 1.0, 0.7, 0.0, 2.0, 1.0]),
        jnp.array([3, 20, 5, 1, 2, 9]),
        jnp.array([1, 0.5, 1, 0.2, 1, 0.9]),
    )
    together, _ = sample(logits, keys, *options)
    alone = [sample(logits[i : i + 1], keys[i : i + 1], *(o[i : i + 1] for o in options))[0][0] for i in range(rows)]
    assert together.tolist() == [int(t) for t in alone]


def test_frequencies():
    n = sample_size(5, 2)
    logits = np.array([0.3, -1.0, 0.9, 0.0, -0.2], np.float32)
    keys = row_keys(jax.random.key(5), 2 * n)
    temperature = jnp.repeat(jnp.array([1.0, 0.6]), n)
    token, _ = sample_jit(jnp.broadcast_to(logits, (2 * n, 5)), keys, temperature)
    for t, drawn in zip((1.0, 0.6), np.asarray(token).reshape(2, n), strict=True):
        assert p_value(np.bincount(drawn, minlength=5), shaped(logits, Shape(t, 5))) > FALSE_ALARM / 2


def test_keys_are_derived_from_one():
    keys = row_keys(jax.random.key(3), 4)
    data = jax.random.key_data(keys).tolist()
    assert len({tuple(d) for d in data}) == 4
    assert jax.random.key_data(row_keys(jax.random.key(3), 2)).tolist() == data[:2]
    assert jax.random.key_data(row_keys(jax.random.PRNGKey(3), 4)).tolist() == data
    stepped = step_keys(keys, jnp.array([0, 1, 0, 1]))
    assert len({tuple(d) for d in jax.random.key_data(stepped).tolist()} | {tuple(d) for d in data}) == 8
    with pytest.raises(ValueError, match="key must be one key"):
        row_keys(keys, 4)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"temperature must have shape \[2\], got \[\]"):
        shape_logits(jnp.zeros((2, 3)), jnp.float32(1.0))
    with pytest.raises(ValueError, match=r"top_k must have shape \[2\], got \[3\]"):
        shape_logits(jnp.zeros((2, 3)), jnp.ones(2), jnp.ones(3, jnp.int32))
