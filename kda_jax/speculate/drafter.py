"""What a drafter is: a pure function that runs inside the compiled loop.

A drafter needs no base class. A frozen (hashable) object with ``num_draft_tokens`` and these two methods is one; the
object is static under ``jax.jit``, its parameters and state are pytrees::

    @dataclasses.dataclass(frozen=True)
    class Unigram:
        \"\"\"Drafts tokens by their frequency: params are logits fp32 [V].\"\"\"

        num_draft_tokens: int

        def start(self, params, context):
            return None  # nothing is kept between steps

        def __call__(self, params, state, context, keys):
            rows = jnp.broadcast_to(params, (context.lengths.shape[0], params.shape[0]))
            logp = shape_logits(rows, context.temperature, context.top_k, context.top_p)
            pick = jax.vmap(lambda key, row: jax.random.categorical(key, row, shape=(self.num_draft_tokens,)))
            probs = jnp.broadcast_to(jnp.exp(logp)[:, None], (rows.shape[0], self.num_draft_tokens, rows.shape[1]))
            return Draft(pick(keys, logp).astype(jnp.int32), probs, state)

A drafter with a state of its own (a smaller model) brings it up to date when called: the tokens it has not seen yet
are the last ``context.lengths - seen`` of ``context.tokens``, all of them accepted, at most ``num_draft_tokens + 1``.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What a drafter may look at, one row per request."""

    tokens: Array  # int32 [B, T]: prompt and output so far; anything beyond a row's length
    lengths: Array  # int32 [B]
    temperature: Array  # fp32 [B]: 0 for greedy rows
    top_k: Array | None = None  # int32 [B]
    top_p: Array | None = None  # fp32 [B]


class Draft(NamedTuple):
    """What a drafter returns.

    ``tokens`` int32 ``[B, m]``; -1 where it has none: judging stops there, and what follows is not looked at.
    ``probs`` fp32 ``[B, m, V]``: the distribution each token was really sampled from, so after temperature, top-k and
    top-p (else the output's distribution is wrong); None for a drafter that does not sample, whose ``q`` is one-hot.
    """

    tokens: Array
    probs: Array | None
    state: Any


class Drafter(Protocol):
    """See the module's description."""

    num_draft_tokens: int

    def start(self, params: Any, context: DraftContext) -> Any:
        """The state after prefill, for prompts in ``context`` (with the token that prefill sampled)."""

    def __call__(self, params: Any, state: Any, context: DraftContext, keys: Array) -> Draft:
        """Draft tokens to follow ``context.tokens``; ``keys`` ``[B]``, one per row."""


def count_drafts(tokens: Array) -> Array:
    """How many drafts each row has, int32 ``[B]``: those before the first -1 of ``tokens`` ``[B, m]``."""
    return jnp.sum(jnp.cumprod(tokens >= 0, axis=1, dtype=jnp.int32), axis=1)
