"""The n-gram drafter (prompt lookup): what followed the last tokens when they occurred before.

Where they occurred several times and went on differently, the drafts may be a tree of several continuations.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kda_jax.options import SpeculativeOptions
from kda_jax.speculate.drafter import Draft, DraftContext

Array = jax.Array


def propose(
    tokens: Array, lengths: Array, num_draft: int, ngram_max: int = 4, ngram_min: int = 1
) -> tuple[Array, Array]:
    """Drafts from the longest suffix that occurred earlier.

    The suffix is of ``ngram_max`` tokens or, failing that, the longest down to ``ngram_min``, that also ends at an
    earlier position; of several such positions the latest counts. The tokens after it are the drafts. Where they run
    into the end of the row they go on with the drafts themselves, as an overlapping copy does: after ``x a b a b`` come
    ``a b a b ..``. So a match always gives ``num_draft`` drafts.

    Args:
      tokens: int32 ``[B, T]``, prompt and output so far; anything beyond a row's length.
      lengths: int32 ``[B]``, in ``[0, T]``.
      num_draft, ngram_max, ngram_min: static, at least 1, and ``ngram_min <= ngram_max``.

    Returns:
      drafts: int32 ``[B, num_draft]``, -1 where there is none.
      counts: int32 ``[B]``: ``num_draft``, or 0 without a match.

    Raises:
      ValueError: naming the argument.
    """
    _check(tokens, lengths, ngram_max, ngram_min)
    if num_draft < 1:
        raise ValueError(f"num_draft must be at least 1, got {num_draft}")
    size = tokens.shape[1]
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, size)
    score = jnp.max(_scores(tokens, lengths, ngram_max, ngram_min), axis=1)
    found = score >= 0
    start = jnp.where(found, score % size + 1, 0)
    drafts = _continuation(tokens, lengths, start[:, None], num_draft)[:, 0]
    return jnp.where(found[:, None], drafts, -1).astype(jnp.int32), jnp.where(found, num_draft, 0).astype(jnp.int32)


def propose_tree(
    tokens: Array, lengths: Array, branches: tuple[int, ...], ngram_max: int = 4, ngram_min: int = 1
) -> tuple[Array, Array]:
    """Several continuations from different matches, merged where they begin alike.

    The first branch is what ``propose`` gives, ``branches[0]`` drafts. Each further one comes from the next best match
    (longest suffix, then latest) that goes on in a way the branches before it don't, within ``branches[0]`` tokens: it
    leaves the branch it shares most with where the two part, and adds up to ``branches[j]`` drafts of its own.

    Args:
      tokens, lengths, ngram_max, ngram_min: as for ``propose``.
      branches: static; drafts of each continuation, at least 1 each, ``m`` in all.

    Returns:
      drafts: int32 ``[B, m]``, branch after branch, -1 where there is none.
      parents: int32 ``[B, m]``: the row of the window each draft follows, 0 for the last token of the row, i for the
        i-th draft; always an earlier one.

    Raises:
      ValueError: naming the argument.
    """
    _check(tokens, lengths, ngram_max, ngram_min)
    if not branches or min(branches) < 1:
        raise ValueError(f"branches must be numbers of drafts, at least 1 each, got {branches}")
    batch, size = tokens.shape
    depth = branches[0]
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, size)
    scores = _scores(tokens, lengths, ngram_max, ngram_min)
    starts = jnp.broadcast_to(jnp.arange(1, size + 1, dtype=jnp.int32)[None], (batch, size))
    ahead = _continuation(tokens, lengths, starts, depth) if len(branches) > 1 else None
    step = jnp.arange(depth, dtype=jnp.int32)[None]
    # per branch: its tokens from the root, how many of them are drafts of the tree, and the rows of those
    texts, ends, rows = [], [], []
    drafts, parents, first = [], [], 1
    for count in branches:
        # shared[b, p]: how far the continuation after position p is in the tree already
        shared = jnp.zeros((batch, size), jnp.int32)
        along = jnp.zeros((batch, size), jnp.int32)
        for i, (text, end) in enumerate(zip(texts, ends, strict=True)):
            same = (ahead == text[:, None]) & (step < end[:, None])[:, None]
            common = jnp.sum(jnp.cumprod(same, axis=2, dtype=jnp.int32), axis=2)
            along = jnp.where(common > shared, i, along)
            shared = jnp.maximum(shared, common)
        score = jnp.max(jnp.where(shared < depth, scores, -1), axis=1)
        found = score >= 0
        place = jnp.where(found, score % size, 0)[:, None]
        text = _continuation(tokens, lengths, place + 1, depth)[:, 0]
        parting = jnp.take_along_axis(shared, place, axis=1)
        # the rows of what it shares, then its own
        row = first + step - parting
        if texts:
            branch = jnp.take_along_axis(along, place, axis=1)
            taken = jnp.take_along_axis(jnp.stack(rows, axis=1), branch[..., None], axis=1)[:, 0]
            row = jnp.where(step < parting, taken, row)
        end = jnp.where(found, jnp.minimum(parting[:, 0] + count, depth), 0)
        own = parting + jnp.arange(count, dtype=jnp.int32)[None]
        real = own < end[:, None]
        own = jnp.minimum(own, depth - 1)
        drafts.append(jnp.where(real, jnp.take_along_axis(text, own, axis=1), -1))
        above = jnp.take_along_axis(jnp.pad(row, ((0, 0), (1, 0))), own, axis=1)
        parents.append(jnp.where(real, above, 0))
        texts.append(text)
        ends.append(end)
        rows.append(row)
        first += count
    return jnp.concatenate(drafts, axis=1).astype(jnp.int32), jnp.concatenate(parents, axis=1).astype(jnp.int32)


def _check(tokens, lengths, ngram_max, ngram_min):
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype} {list(tokens.shape)}")
    if lengths.shape != tokens.shape[:1]:
        raise ValueError(f"lengths must have shape [{tokens.shape[0]}], got {list(lengths.shape)}")
    if not 1 <= ngram_min <= ngram_max:
        raise ValueError(f"ngram_min must be in [1, ngram_max={ngram_max}], got {ngram_min}")


def _scores(tokens: Array, lengths: Array, ngram_max: int, ngram_min: int) -> Array:
    """How good it is to go on as after each position, int32 ``[B, T]``: the longest match before the latest; -1 where
    there is none. Modulo ``T`` it is the position."""
    batch, size = tokens.shape
    last = lengths - 1
    # the last tokens, newest first; -1 before the start of the row equals no token
    back = last[:, None] - lax.broadcasted_iota(jnp.int32, (batch, ngram_max), 1)
    suffix = jnp.where(back >= 0, jnp.take_along_axis(tokens, jnp.maximum(back, 0), axis=1), -1)
    # matched[b, j]: how many tokens, ending with tokens[b, j], equal the end of the row
    position = lax.broadcasted_iota(jnp.int32, (batch, size), 1)
    matched = jnp.zeros((batch, size), jnp.int32)
    run = position < last[:, None]
    for k in range(ngram_max):
        equal = tokens == suffix[:, k : k + 1]
        run = run & jnp.pad(equal[:, : size - k], ((0, 0), (k, 0)))[:, :size]
        matched = matched + run
    return jnp.where(matched >= ngram_min, matched * size + position, -1)


def _continuation(tokens: Array, lengths: Array, starts: Array, count: int) -> Array:
    """``count`` tokens from each of ``starts`` [B, n] on, going round from there at a row's end: [B, n, count]."""
    period = jnp.maximum(lengths[:, None] - starts, 1)[..., None]
    ahead = lax.broadcasted_iota(jnp.int32, (*starts.shape, count), 2) % period
    place = jnp.minimum(starts[..., None] + ahead, tokens.shape[1] - 1)
    return jnp.take_along_axis(tokens, place.reshape(tokens.shape[0], -1), axis=1).reshape(place.shape)


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """``propose``, or with ``branches`` ``propose_tree``, as a drafter: no parameters, no state, no randomness."""

    num_draft_tokens: int
    ngram_max: int = 4
    ngram_min: int = 1
    branches: tuple[int, ...] | None = None

    @classmethod
    def from_options(cls, options: SpeculativeOptions) -> "NgramDrafter":
        return cls(options.num_draft_tokens, options.ngram_max, options.ngram_min, options.branches)

    def start(self, params: None, context: DraftContext) -> None:
        return None

    def __call__(self, params: None, state: None, context: DraftContext, keys: Array) -> Draft:
        text, how = (context.tokens, context.lengths), (self.ngram_max, self.ngram_min)
        if self.branches is not None:
            drafts, parents = propose_tree(*text, self.branches, *how)
            return Draft(drafts, None, state, parents)
        drafts, _ = propose(*text, self.num_draft_tokens, *how)
        return Draft(drafts, None, state)
