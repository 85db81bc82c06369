"""The n-gram drafter (prompt lookup): what followed the last tokens when they occurred before."""

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
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype} {list(tokens.shape)}")
    if lengths.shape != tokens.shape[:1]:
        raise ValueError(f"lengths must have shape [{tokens.shape[0]}], got {list(lengths.shape)}")
    if num_draft < 1:
        raise ValueError(f"num_draft must be at least 1, got {num_draft}")
    if not 1 <= ngram_min <= ngram_max:
        raise ValueError(f"ngram_min must be in [1, ngram_max={ngram_max}], got {ngram_min}")
    batch, size = tokens.shape
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, size)
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
    # the longest, then the latest
    score = jnp.max(jnp.where(matched >= ngram_min, matched * size + position, -1), axis=1)
    found = score >= 0
    start = jnp.where(found, score % size + 1, 0)
    period = jnp.maximum(lengths - start, 1)
    ahead = lax.broadcasted_iota(jnp.int32, (batch, num_draft), 1) % period[:, None]
    drafts = jnp.take_along_axis(tokens, start[:, None] + ahead, axis=1)
    return jnp.where(found[:, None], drafts, -1).astype(jnp.int32), jnp.where(found, num_draft, 0).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """``propose`` as a drafter: no parameters, no state, no randomness."""

    num_draft_tokens: int
    ngram_max: int = 4
    ngram_min: int = 1

    @classmethod
    def from_options(cls, options: SpeculativeOptions) -> "NgramDrafter":
        return cls(options.num_draft_tokens, options.ngram_max, options.ngram_min)

    def start(self, params: None, context: DraftContext) -> None:
        return None

    def __call__(self, params: None, state: None, context: DraftContext, keys: Array) -> Draft:
        drafts, _ = propose(context.tokens, context.lengths, self.num_draft_tokens, self.ngram_max, self.ngram_min)
        return Draft(drafts, None, state)
