"""Chi-square tests with a stated power: how many draws, and whether counts fit.

A suite of ``tests`` chi-square tests rejects a right implementation with probability ``FALSE_ALARM`` at most, and each
of them notices a distribution at total variation ``DISTANCE`` with probability ``POWER`` at least.
"""

import numpy as np
from scipy import optimize, stats

FALSE_ALARM = 1e-4
POWER = 0.95
DISTANCE = 0.03
SMALLEST_EXPECTED = 10


def sample_size(cells: int, tests: int) -> int:
    """Draws that a chi-square test of ``cells`` cells, one of ``tests``, needs.

    With n draws the statistic is non-central chi-square with non-centrality ``n sum (r - p)^2 / p``, which is at least
    ``n (sum |r - p|)^2 = 4 n DISTANCE^2`` (Cauchy-Schwarz).
    """
    critical = stats.chi2.isf(FALSE_ALARM / tests, cells - 1)
    enough = optimize.brentq(lambda c: stats.ncx2.sf(critical, cells - 1, c) - POWER, 1e-3, 1e4)
    return int(np.ceil(enough / (4 * DISTANCE**2)))


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of the counts under the probabilities; 0 when something impossible was counted.

    Cells that expect fewer than ``SMALLEST_EXPECTED`` are counted as one, which hides little: the most they may weigh
    together is a tenth of ``DISTANCE``.
    """
    counts, probabilities = np.ravel(counts).astype(float), np.ravel(probabilities)
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    counts, probabilities = counts[possible], probabilities[possible]
    total = counts.sum()
    small = probabilities * total < SMALLEST_EXPECTED
    assert probabilities[small].sum() <= DISTANCE / 10, "too few draws for so many unlikely cells"
    if small.any():
        # with the smallest of the others, so that the cell they form is not small itself
        small |= probabilities == probabilities[~small].min()
        counts = np.append(counts[~small], counts[small].sum())
        probabilities = np.append(probabilities[~small], probabilities[small].sum())
    if len(counts) == 1:
        return 1.0
    return float(stats.chisquare(counts, probabilities / probabilities.sum() * total).pvalue)
