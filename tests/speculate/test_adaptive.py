"""Which drafts are verified: a prefix of each row's, the likeliest of all, as many as pay."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax.speculate.adaptive import allocate, best_budget, expected, faded, monotone, sizes

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


@pytest.mark.parametrize("xp", [np, jnp])
def test_the_budget_maximises_tokens_per_millisecond(xp):
    survival = xp.asarray([0.5, 0.8, 0.9, 0.4, 0.1, 0.05])
    sizes = (2, 4, 8)

    def best(survival, rows, costs, sizes=sizes):
        budget, index = best_budget(survival, rows, sizes, costs, xp=xp)
        return int(budget), sizes[int(index)]

    assert best(survival, 2, (1.0, 1.0, 1.0)) == (6, 8)  # as in a step that waits for memory: everything
    assert best(survival, 2, (2.0, 4.0, 8.0)) == (0, 2)  # each draft costs a token and brings less than one
    stairs = 2.0, 2.5, 5.0
    assert best(survival, 2, stairs) == (2, 4)
    assert best(survival, 1, stairs) == (3, 4)  # room that a padded row leaves is used
    assert best(survival, 3, stairs) == (1, 4)  # more rows than the first size holds
    assert best(xp.zeros(0), 2, stairs) == (0, 2)
    # not the first improvement that stops: the best is behind a worse one
    assert best(xp.full(6, 0.9), 2, (1.0, 2.5, 3.0)) == (6, 8)
    assert best(xp.asarray([1.0, 1.0]), 2, (1.0, 2.0), (2, 4)) == (0, 2)  # of equal rates the smaller


def test_what_is_expected_follows_the_record():
    assert expected(0.0, 0.0, 0.0, 0.0) == 1  # nothing known: all is possible
    judged, stood = 0.0, 0.0
    for _ in range(50):
        judged, stood = faded(judged, stood, 7, 2)  # two stand, the third doesn't, the rest says nothing
    assert stood / judged == pytest.approx(2 / 3)
    assert faded(0.0, 0.0, 3, 3) == (3, 3)
    few, many = expected(judged, stood, 1000.0, 100.0), expected(judged, stood, 1000.0, 900.0)
    assert 0.1 < few < 2 / 3 < many < 0.9
    assert faded(*(jnp.asarray([x]) for x in (0.0, 0.0, 7, 2)))[0].tolist() == [3.0]


def test_sizes_and_their_costs():
    assert sizes(4, 8) == [4, 8, 16, 32]
    assert sizes(2, 7) == [2, 4, 8, 14]
    assert sizes(1, 1) == [1]
    assert monotone([(1, 2.0), (2, 1.0), (4, 3.0)]) == [(1, 2.0), (2, 2.0), (4, 3.0)]
