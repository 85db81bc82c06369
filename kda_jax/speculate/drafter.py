"""What a drafter is: a pure function that runs inside the compiled loop.

A drafter needs no base class. A frozen (hashable) object with ``num_draft_tokens`` and these two methods is one; the
object is static under ``jax.jit``, its parameters and state are pytrees. This one drafts tokens by their frequency;
its parameters are logits fp32 [V]::

    import dataclasses

    import jax
    import jax.numpy as jnp
    from kda_jax.speculate.drafter import Draft
    from kda_jax.speculate.sampling import shape_logits

    @dataclasses.dataclass(frozen=True)
    class Unigram:
        num_draft_tokens: int

        def start(self, params, context):
            return None  # nothing is kept between steps

        def __call__(self, params, state, context, keys):
            batch, m = context.lengths.shape[0], self.num_draft_tokens
            rows = jnp.broadcast_to(params[None], (batch, params.shape[0]))
            logp = shape_logits(rows, context.temperature, context.top_k, context.top_p)
            tokens = jax.vmap(lambda key, row: jax.random.categorical(key, row, shape=(m,)))(keys, logp)
            probs = jnp.broadcast_to(jnp.exp(logp)[:, None], (batch, m, rows.shape[1]))
            return Draft(tokens.astype(jnp.int32), probs, state)

It is used as ``kda_jax.generate(..., speculative=SpeculativeOptions("custom", 3), drafter=(Unigram(3), logits))``.

Rules. ``probs`` is what the tokens were really drawn from, given the context and the drafts they follow; a drafter that
does not draw returns None, and its tokens may depend on anything in the context. Greedy rows (temperature 0) are judged
by the tokens alone. A token of -1 is no draft. Whatever a drafter returns, the output is the target model's: a poor
drafter costs time, wrong ``probs`` are the one way to spoil the distribution.

A drafter with a state of its own (a smaller model, ``draft_model.py``) brings it up to date when called: the tokens it
has not seen yet are the last ``context.lengths - seen`` of ``context.tokens``, all of them accepted, at most
``num_draft_tokens + 1``. It is called before every verify, also for rows that have ended, whose drafts are not looked
at.

A drafter of a tree returns ``parents`` too: draft i (1..m) follows row ``parents[:, i - 1]`` of the window, an earlier
one; 0 is the last token of the context and i is draft i. ``tree.py`` says how siblings are drawn.
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
    prompt_size: int | None = dataclasses.field(default=None, metadata={"static": True})  # columns prompts may reach


class Draft(NamedTuple):
    """What a drafter returns.

    ``tokens`` int32 ``[B, m]``; -1 where it has none: judging stops there, and what follows is not looked at.
    ``probs`` fp32 ``[B, m, V]``: the distribution each token was really sampled from, so after temperature, top-k and
    top-p (else the output's distribution is wrong); None for a drafter that does not sample, whose ``q`` is one-hot.
    ``parents`` int32 ``[B, m]``: None for a chain; else the drafts are a tree (see the module's description).
    ``confidence`` fp32 ``[B, m]``: the probability, in [0, 1], that a draft stands if those before it do, for adaptive
    verification; None for a drafter that can't say.
    """

    tokens: Array
    probs: Array | None
    state: Any
    parents: Array | None = None
    confidence: Array | None = None


class Drafter(Protocol):
    """See the module's description."""

    num_draft_tokens: int

    def start(self, params: Any, context: DraftContext) -> Any:
        """The state after prefill, for prompts in ``context`` (with the token that prefill sampled)."""

    def __call__(self, params: Any, state: Any, context: DraftContext, keys: Array) -> Draft:
        """Draft tokens to follow ``context.tokens``; ``keys`` ``[B]``, one per row."""


def count_drafts(tokens: Array, parents: Array | None = None) -> Array:
    """How many drafts each row has, int32 ``[B]``, of ``tokens`` ``[B, m]``: of a chain those before the first -1, of a
    tree those up to the last that is not -1."""
    if parents is not None:
        number = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)[None]
        return jnp.max(jnp.where(tokens >= 0, number, 0), axis=1, initial=0)
    return jnp.sum(jnp.cumprod(tokens >= 0, axis=1, dtype=jnp.int32), axis=1)
