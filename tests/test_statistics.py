"""The chi-square helper keeps the false-alarm rate and the power it states."""

import numpy as np
from scipy import stats

from tests.statistics import DISTANCE, POWER, p_value, sample_size


def moved(probabilities: np.ndarray) -> np.ndarray:
    """The distribution at ``DISTANCE`` that a chi-square test finds hardest to see: cells change in proportion."""
    half = np.where(np.arange(len(probabilities)) % 2, 1, -1) * probabilities
    up, down = half[half > 0].sum(), -half[half < 0].sum()
    return probabilities + DISTANCE * np.where(half > 0, half / up, half / down)


def test_power_is_what_it_says():
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(27, 3.0))
    tests = 200
    n = sample_size(27, tests)
    other = moved(probabilities)
    assert abs(np.abs(other - probabilities).sum() / 2 - DISTANCE) < 1e-12
    found = [p_value(rng.multinomial(n, other), probabilities) < 1e-4 / tests for _ in range(400)]
    assert stats.binomtest(sum(found), 400, POWER, alternative="less").pvalue > 1e-3


def test_false_alarms_are_as_rare_as_it_says():
    rng = np.random.default_rng(1)
    probabilities = rng.dirichlet(np.full(27, 3.0))
    n = sample_size(27, 200)
    values = [p_value(rng.multinomial(n, probabilities), probabilities) for _ in range(1000)]
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_impossible_cells_and_pooling():
    assert p_value(np.array([50, 50, 1]), np.array([0.5, 0.5, 0.0])) == 0
    assert p_value(np.array([50, 50, 0]), np.array([0.5, 0.5, 0.0])) == 1
    assert p_value(np.array([10_000, 9_990, 10]), np.array([0.5, 0.4998, 0.0002])) > 1e-3
