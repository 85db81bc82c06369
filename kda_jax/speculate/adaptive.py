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


def best_budget(survival: np.ndarray, rows: int, costs: Sequence[tuple[int, float]]) -> tuple[int, int]:
    """(drafts to verify, tokens the step is compiled for) with the most expected tokens per millisecond.

    Args:
      survival: [n] of all drafts that could be verified, in any order, each the product of its row's confidences.
      rows: how many rows sample, each at least one token.
      costs: (tokens, milliseconds) of each size a step can have, ascending; a step of b drafts takes the first with
        ``rows + b`` tokens. Of equals the smaller wins.

    Raises:
      ValueError: costs has no size for the rows alone.
    """
    gain = np.concatenate([[0.0], np.cumsum(np.sort(np.asarray(survival, np.float64))[::-1])])
    best = None
    for tokens, ms in costs:
        budget = min(tokens - rows, len(gain) - 1)  # what a size has room for costs nothing more
        if budget < 0:
            continue
        rate = (rows + gain[budget]) / max(ms, 1e-6)
        if best is None or rate > best[0]:
            best = rate, budget, tokens
    if best is None:
        raise ValueError(f"costs must have a size of at least rows={rows} tokens, got {list(costs)}")
    return best[1], best[2]


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
