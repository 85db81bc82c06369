"""Adaptive verification: how many drafts a step verifies, and which.

The budget maximises the tokens expected per millisecond by a measured cost table. It comes from what was known before
the step's drafts were made, so that no draft decides whether it is looked at, and the output's distribution stays the
target's. Within the budget the drafts most likely to stand are verified: survival is the running product of a row's
confidences, so each row keeps a prefix.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
PRIOR = 4.0  # drafts
FADING = 0.9


def allocate(confidence: Array, count: Array, budget: Array) -> Array:
    """Drafts that each row verifies, int32 [B]: the ``budget`` likeliest of all, ties to the earlier position.

    Args:
      confidence: fp32 [B, m]: the probability that a draft stands if those before it do; NaN counts as 0.
      count: int32 [B]: drafts each row has.
      budget: int32 []: most drafts in all.
    """
    batch, m = confidence.shape
    survival = jnp.cumprod(jnp.clip(jnp.nan_to_num(confidence, nan=0.0), 0, 1), axis=1)
    there = jnp.arange(m)[None] < count[:, None]
    # position by position, so that a stable order puts the earlier of a row's equals first
    score = jnp.where(there, survival, -1.0).T.reshape(-1)
    order = jnp.argsort(-score, stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    kept = (rank < budget).reshape(m, batch).T & there
    return jnp.sum(kept, axis=1, dtype=jnp.int32)


def best_budget(survival, rows, tokens: Sequence[int], costs, *, xp=np):
    """The budget with the most expected tokens per millisecond, and the size of step that has room for it.

    Args:
      survival: fp [n] of all drafts that could be verified, in any order, each the product of its row's confidences.
      rows: how many rows sample, each at least one token.
      tokens: the sizes a step can have, ascending, the last at least ``rows``; a step of b drafts takes the first with
        ``rows + b``.
      costs: milliseconds of each, above 0.
      xp: numpy, or jax.numpy inside a compiled program.

    Returns:
      (drafts to verify, index of the size). Of equals the smaller wins.
    """
    gain = xp.concatenate([xp.zeros(1), xp.cumsum(-xp.sort(-survival))])
    room = xp.asarray(tokens) - rows
    budget = xp.clip(room, 0, survival.shape[0])  # what a size has room for costs nothing more
    rate = xp.where(room >= 0, (rows + xp.take(gain, budget)) / xp.asarray(costs), -1.0)
    best = xp.argmax(rate)
    return budget[best], best


def expected(judged, stood, all_judged, all_stood):
    """The probability that a draft stands, by what was judged and stood: a row's own record, which ``PRIOR`` drafts of
    everybody's weigh against."""
    everybody = (all_stood + 1) / (all_judged + 1)
    return (stood + PRIOR * everybody) / (judged + PRIOR)


def faded(judged, stood, num_judged, num_stood):
    """A row's record (judged, stood) after a window of ``num_judged`` drafts of which the first ``num_stood`` stood;
    what follows the first rejection says nothing, and older windows fade."""
    seen = num_stood + (num_judged > num_stood)
    return FADING * judged + seen, FADING * stood + num_stood


def sizes(rows: int, window: int) -> list[int]:
    """Tokens that a step of ``rows`` windows is compiled for: powers of two times the rows, and all of them."""
    found, size = [], rows
    while size < rows * window:
        found.append(size)
        size *= 2
    return [*found, rows * window]


def monotone(costs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """``costs`` with no size cheaper than a smaller one."""
    highest = np.maximum.accumulate([ms for _, ms in costs])
    return [(tokens, float(ms)) for (tokens, _), ms in zip(costs, highest, strict=True)]
