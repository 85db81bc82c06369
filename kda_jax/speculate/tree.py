"""Which path of a tree of drafts stands, and the token that follows it.

Drafts ``1..m`` of a row are rows ``1..m`` of its window; draft i hangs from row ``parents[i]``, an earlier one (0 is
the token drafted from), and ``logits[i]`` follow the path to row i. Rows with the same parent are siblings, tried in
the order of their rows. The output is distributed as plain sampling:

- greedy rows: the longest path on which every draft is the most likely token behind its parent;
- sampled rows: recursive rejection over siblings (SpecInfer's multi-step acceptance; Jeon et al. 2024, Yang et al.
  2024). With ``r = p`` behind the current row, a sibling x drawn from q stands with probability ``min(r(x) / q(x), 1)``
  and is then the current row; else ``r`` becomes ``normalise(max(r - q, 0))`` and the next sibling is tried. When none
  is left the token that follows is drawn from ``r``.

A sibling may be drawn without replacement: its ``q`` is then the distribution given its elder siblings, which it may
depend on, as ``r`` depends on them. It must not depend on anything younger, and which drafts a tree holds must not
depend on what was drawn for them. A chain is judged as ``rejection.accept`` judges it, with the same random numbers.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kda_jax.ops.tree import paths
from kda_jax.speculate.rejection import Acceptance, at_column, check_window, noise
from kda_jax.speculate.sampling import best_token, shape_logits

Array = jax.Array


def window_parents(parents: Array) -> Array:
    """Parents of a window's rows, int32 ``[B, m + 1]``, from those of its drafts, ``[B, m]``."""
    return jnp.pad(parents.astype(jnp.int32), ((0, 0), (1, 0)), constant_values=-1)


def accept_tree(
    logits: Array,
    drafts: Array,
    parents: Array,
    num_draft: Array,
    draft_probs: Array | None,
    keys: Array,
    temperature: Array,
    top_k: Array | None = None,
    top_p: Array | None = None,
) -> Acceptance:
    """Judge a tree of drafts of every row and choose the token that follows the path that stands.

    Greedy and sampled rows mix; a row's outcome depends on that row's arguments only. A draft outside ``[0, V)`` (-1
    is padding), at or past the row's number, or with a parent that is not an earlier row, is not there, and nothing
    behind it stands. Nothing stands behind bad logits (NaN, +inf, or -inf throughout) either: they are never sampled
    from, and are reported only when the path to them stands.

    Args:
      logits: ``[B, m + 1, V]``.
      drafts, parents: int32 ``[B, m]``; see the module's description.
      num_draft: int32 ``[B]``, the row's drafts are the first of those.
      draft_probs: ``[B, m, V]``, what each draft was really drawn from, or None for drafts that were not drawn.
      keys, temperature, top_k, top_p: ``[B]``, as for ``rejection.accept``.

    Returns:
      ``Acceptance`` with ``path`` int32 ``[B, m + 1]``: the window's rows that stand, row 0 first, then zeros.

    Raises:
      ValueError: naming the argument.
    """
    check_window(logits, drafts, num_draft, draft_probs, keys, temperature, top_k, top_p)
    if parents.shape != drafts.shape or not jnp.issubdtype(parents.dtype, jnp.integer):
        raise ValueError(
            f"parents must be integers {list(drafts.shape)} as drafts are, got {parents.dtype} {list(parents.shape)}"
        )
    batch, window, vocab = logits.shape
    m = window - 1
    logits = logits.astype(jnp.float32)
    best, bad = best_token(logits)
    index = lax.broadcasted_iota(jnp.int32, (batch, m), 1)
    parents = jnp.where((parents >= 0) & (parents <= index), parents, -1).astype(jnp.int32)
    above = jnp.maximum(parents, 0)
    there = (index < num_draft[:, None]) & (drafts >= 0) & (drafts < vocab) & (parents >= 0)
    there &= ~jnp.take_along_axis(bad, above, axis=1)

    on_path = paths(window_parents(parents))
    matches = there & (drafts == jnp.take_along_axis(best, above, axis=1))
    end = _longest(on_path, matches)
    greedy = end, at_column(best, end)

    def judged():
        def rows(x: Array | None) -> Array | None:
            return None if x is None else jnp.broadcast_to(x[:, None], (batch, window))

        log_probs = shape_logits(logits, rows(temperature), rows(top_k), rows(top_p))
        uniforms, gumbel = noise(keys, m, vocab)
        drawn, weights, _ = walk(log_probs, drafts, parents, there, draft_probs, uniforms)
        sampled = temperature > 0
        last = best_token(weights + gumbel)[0]
        return jnp.where(sampled, drawn, greedy[0]), jnp.where(sampled, last, greedy[1])

    end, last = lax.cond(jnp.any(temperature > 0), judged, lambda: greedy)
    path, accepted = _rows_of(on_path, end)
    nan = at_column(bad, end)
    column = lax.broadcasted_iota(jnp.int32, (batch, window), 1)
    # token k of the output is the draft in row path[k + 1] of the window
    padded = jnp.pad(drafts.astype(jnp.int32), ((0, 0), (1, 0)))
    following = jnp.pad(path[:, 1:], ((0, 0), (0, 1)))
    tokens = jnp.take_along_axis(padded, following, axis=1)
    last = jnp.where(nan, 0, last)[:, None]
    tokens = jnp.where(column < accepted[:, None], tokens, jnp.where(column == accepted[:, None], last, 0))
    return Acceptance(accepted, tokens, nan, path)


def walk(
    log_probs: Array, drafts: Array, parents: Array, there: Array, draft_probs: Array | None, uniforms: Array
) -> tuple[Array, Array, Array]:
    """Recursive rejection, given the numbers it is decided with.

    Args:
      log_probs: the target's, shaped, fp32 ``[B, m + 1, V]``. drafts, parents: int32 ``[B, m]``. there: bool
        ``[B, m]``. draft_probs: ``[B, m, V]`` or None. uniforms: fp32 ``[B, m]``; a draft that is tried stands when its
        number lies below its threshold.

    Returns:
      The row of the window that the path ends in, int32 ``[B]``; log weights of the token that follows, fp32
      ``[B, V]``; and the thresholds fp32 ``[B, m]``, NaN for drafts that were not tried.
    """
    run = _walk_known if draft_probs is None else _walk_drawn
    return run(log_probs, drafts, parents, there, draft_probs, uniforms)


def _walk_known(log_probs, drafts, parents, there, draft_probs, uniforms):
    """Drafts that were not drawn: ``q`` is one-hot, and what siblings take from the target is a sum of scalars."""
    batch, window, vocab = log_probs.shape
    flat = jnp.maximum(parents, 0) * vocab + jnp.clip(drafts, 0, vocab - 1)
    target = jnp.exp(jnp.take_along_axis(log_probs.reshape(batch, -1), flat, axis=1))
    older = jnp.tri(window - 1, k=-1, dtype=bool)[None]
    again = (drafts[:, :, None] == drafts[:, None]) & (parents[:, :, None] == parents[:, None]) & older
    target = jnp.where(jnp.any(again & there[:, None], axis=2), 0.0, target)

    def step(i, carry):
        current, taken, h = carry
        tried = there[:, i] & (parents[:, i] == current)
        ratio = target[:, i] / jnp.maximum(1 - taken, jnp.finfo(jnp.float32).tiny)
        stands = tried & (uniforms[:, i] < ratio)
        taken = jnp.where(stands, 0.0, taken + jnp.where(tried, target[:, i], 0.0))
        return jnp.where(stands, i + 1, current), taken, h.at[:, i].set(jnp.where(tried, ratio, jnp.nan))

    zero = jnp.zeros(batch, jnp.float32)
    start = jnp.zeros(batch, jnp.int32), zero, jnp.zeros(drafts.shape, jnp.float32)
    current, _, h = lax.fori_loop(0, window - 1, step, start)
    behind = at_column(log_probs, current)
    refused = jnp.where(there & (parents == current[:, None]), drafts, vocab)
    residual = behind.at[jnp.arange(batch)[:, None], refused].set(-jnp.inf, mode="drop")
    # nothing left of a target that lies on the siblings up to rounding: such a rejection is rounding too
    residual = jnp.where(jnp.max(residual, axis=1, keepdims=True) > -jnp.inf, residual, behind)
    return current, residual, h


def _walk_drawn(log_probs, drafts, parents, there, draft_probs, uniforms):
    batch, window, vocab = log_probs.shape
    # a drafter whose probabilities are not numbers has drawn nothing
    there &= jnp.all(jnp.isfinite(draft_probs), axis=-1)
    chosen = jnp.clip(drafts, 0, vocab - 1)

    def step(i, carry):
        # r, not normalised, and its sum; whether it is still the whole target behind the current row
        current, left, mass, whole, h = carry
        q = lax.dynamic_index_in_dim(draft_probs, i, axis=1, keepdims=False).astype(jnp.float32)
        token = lax.dynamic_slice_in_dim(chosen, i, 1, axis=1)
        tried = there[:, i] & (parents[:, i] == current)
        proposal = jnp.take_along_axis(q, token, axis=1)[:, 0]
        usable = tried & (proposal > 0)
        numerator = jnp.where(usable, jnp.take_along_axis(left, token, axis=1)[:, 0], 0.0)
        ratio = numerator / jnp.where(usable, mass * proposal, 1.0)
        stands = usable & (uniforms[:, i] < ratio)
        refused = tried & ~stands
        rest = jnp.maximum(left - mass[:, None] * q, 0.0)
        remaining = jnp.sum(rest, axis=1)
        # nothing left of a target that equals the drafter's up to rounding: such a rejection is rounding too
        refused &= remaining > 0
        behind = jnp.exp(lax.dynamic_index_in_dim(log_probs, i + 1, axis=1, keepdims=False))
        left = jnp.where(stands[:, None], behind, jnp.where(refused[:, None], rest, left))
        mass = jnp.where(stands, 1.0, jnp.where(refused, remaining, mass))
        return (
            jnp.where(stands, i + 1, current),
            left,
            mass,
            (whole & ~refused) | stands,
            h.at[:, i].set(jnp.where(tried, ratio, jnp.nan)),
        )

    zero = jnp.zeros(batch, jnp.int32)
    start = zero, jnp.exp(log_probs[:, 0]), jnp.ones(batch), zero == 0, jnp.zeros(drafts.shape, jnp.float32)
    current, left, _, whole, h = lax.fori_loop(0, window - 1, step, start)
    return current, jnp.where(whole[:, None], at_column(log_probs, current), jnp.log(left)), h


def _longest(on_path: Array, matches: Array) -> Array:
    """The row, int32 ``[B]``, that ends the longest path on which every draft matches; of equals the first."""
    window = on_path.shape[1]
    fine = jnp.pad(matches, ((0, 0), (1, 0)), constant_values=True)
    stands = jnp.all(fine[:, None] | ~on_path, axis=2) & on_path[:, :, 0]
    score = jnp.sum(on_path, axis=2) * window - jnp.arange(window)[None]
    return jnp.argmax(jnp.where(stands, score, -1), axis=1).astype(jnp.int32)


def _rows_of(on_path: Array, end: Array) -> tuple[Array, Array]:
    """The rows on the way to ``end`` ``[B]``, int32 ``[B, W]`` padded with zeros; and how many of them are drafts."""
    window = on_path.shape[1]
    rows = at_column(on_path, end)
    place = jnp.where(rows, jnp.cumsum(rows, axis=1, dtype=jnp.int32) - 1, window)
    number = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    path = jnp.zeros(rows.shape, jnp.int32).at[jnp.arange(rows.shape[0])[:, None], place].set(number, mode="drop")
    return path, jnp.sum(rows, axis=1, dtype=jnp.int32) - 1
