"""Which drafts are verified: a prefix of each row's, the likeliest of all, as many as pay."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax.speculate.adaptive import allocate, best_budget, monotone, sizes

B, M = 4, 3
PROBABILITY = st.sampled_from([0.0, 0.2, 0.5, 0.5, 0.9, 1.0])


def rows(values):
    return st.lists(values, min_size=B, max_size=B)


@settings(max_examples=60, deadline=None)
@given(rows(st.lists(PROBABILITY, min_size=M, max_size=M)), rows(st.integers(0, M)), st.integers(0, B * M + 1))
def test_a_budget_takes_the_likeliest_prefixes(confidence, count, budget):
    confidence, count = np.asarray(confidence, np.float32), np.asarray(count, np.int32)
    found = np.asarray(allocate(jnp.asarray(confidence), jnp.asarray(count), jnp.int32(budget)))
    assert found.sum() == min(budget, count.sum())
    assert (found <= count).all()
    survival = np.cumprod(confidence, axis=1)

    def worth(lengths):
        return sum(survival[row, :length].sum() for row, length in enumerate(lengths))

    choices = itertools.product(*(range(c + 1) for c in count))
    best = max(worth(lengths) for lengths in choices if sum(lengths) == found.sum())
    assert worth(found) == pytest.approx(best, abs=1e-6)


def test_confidences_that_are_not_numbers_come_last():
    confidence = jnp.asarray([[np.nan, 1.0], [0.1, 0.1]])
    assert allocate(confidence, jnp.asarray([2, 2]), jnp.int32(2)).tolist() == [0, 2]


def test_the_budget_maximises_tokens_per_millisecond():
    survival = np.asarray([0.9, 0.8, 0.5, 0.4, 0.1, 0.05])
    free = [(2, 1.0), (4, 1.0), (8, 1.0)]  # as in a step that waits for memory: everything
    assert best_budget(survival, 2, free) == (6, 8)
    linear = [(2, 2.0), (4, 4.0), (8, 8.0)]  # each draft costs a token and brings less than one
    assert best_budget(survival, 2, linear) == (0, 2)
    stairs = [(2, 2.0), (4, 2.5), (8, 5.0)]
    assert best_budget(survival, 2, stairs) == (2, 4)
    assert best_budget(survival, 1, stairs) == (3, 4)  # room that a padded row leaves is used
    assert best_budget(np.zeros(0), 2, stairs) == (0, 2)
    # not the first improvement that stops: the best is behind a worse one
    assert best_budget(np.full(6, 0.9), 2, [(2, 1.0), (4, 2.5), (8, 3.0)]) == (6, 8)


def test_equal_rates_verify_less():
    assert best_budget(np.asarray([1.0, 1.0]), 2, [(2, 1.0), (4, 2.0)]) == (0, 2)


def test_no_size_for_the_rows_is_refused():
    with pytest.raises(ValueError, match="costs must have a size of at least rows=5 tokens"):
        best_budget(np.ones(3), 5, [(2, 1.0), (4, 1.0)])


def test_sizes_and_their_costs():
    assert sizes(4, 8) == [4, 8, 16, 32]
    assert sizes(2, 7) == [2, 4, 8, 14]
    assert sizes(1, 1) == [1]
    assert monotone([(1, 2.0), (2, 1.0), (4, 3.0)]) == [(1, 2.0), (2, 2.0), (4, 3.0)]
