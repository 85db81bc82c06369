"""A toy target and toy drafters over a few tokens, the loop that runs them, and the distribution they must give.

The target is a random table: logits of the next token given the last two. A drafter is a table too, of logits
(probabilistic) or of one token for each context (deterministic; -1 for no draft).
"""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.speculate.drafter import count_drafts
from kda_jax.speculate.rejection import accept
from kda_jax.speculate.sampling import row_keys, shape_logits, step_keys

VOCAB = 3
DRAFTS = 3
STEPS = 3  # each emits at least one token
START = (1, 2)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sampling options of a row; the largest top_k and a top_p of 1 change nothing."""

    temperature: float = 1.0
    top_k: int = VOCAB
    top_p: float = 1.0


SHAPES = (Shape(), Shape(0.7), Shape(1.3, top_k=2), Shape(0.9, top_p=0.75))

_rng = np.random.default_rng(7)
TARGET = _rng.uniform(-1, 1, (VOCAB, VOCAB, VOCAB)).astype(np.float32)
_other = _rng.uniform(-1.5, 1.5, TARGET.shape).astype(np.float32)
_even = (np.arange(VOCAB) % 2 == 0)[:, None, None]

# "adversarial" is drawn from as it is, without the row's temperature, top-k and top-p: tokens the target can't emit too
PROBABILISTIC = {
    "right": TARGET,
    "wrong": _other,
    "adversarial": -2 * TARGET,
    "half right": np.where(_even, TARGET, _other),
}
DETERMINISTIC = {
    "right": TARGET.argmax(-1),
    "wrong": TARGET.argsort(-1)[..., -2],
    "adversarial": TARGET.argmin(-1),
    "half right": np.where(_even[..., 0], TARGET.argmax(-1), TARGET.argmin(-1)),
    "sometimes silent": np.where(np.arange(VOCAB) % 3 == 0, -1, TARGET.argmax(-1)),
}


def shaped(logits: np.ndarray, shape: Shape) -> np.ndarray:
    """Probabilities fp64 of one row, by sorting: an independent statement of temperature, top-k, top-p."""
    logits = logits.astype(np.float64)
    if shape.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order] - logits.max()) / shape.temperature)
    weights[shape.top_k :] = 0
    weights /= weights.sum()
    if shape.top_p < 1:
        weights[1:][np.cumsum(weights)[:-1] >= shape.top_p] = 0
        weights /= weights.sum()
    out = np.empty_like(weights)
    out[order] = weights
    return out


def joint(shape: Shape, length: int = 3) -> np.ndarray:
    """Probability fp64 ``[V] * length`` of the next tokens under plain sampling from the target."""
    out = np.zeros((VOCAB,) * length)
    for tokens in itertools.product(range(VOCAB), repeat=length):
        context = (*START, *tokens)
        out[tokens] = np.prod([shaped(TARGET[context[i : i + 2]], shape)[t] for i, t in enumerate(tokens)])
    return out


@partial(jax.jit, static_argnames=("method", "probabilistic", "draws", "synthetic_rates"))
def run(tables, key, draws: int, method: str, probabilistic: bool, synthetic_rates=None):
    """Speculate ``draws`` times for every table and every shape.

    ``tables`` ``[k, V, V, V]`` logits, of which those of index 2 are drawn from unshaped, or ``[k, V, V]`` tokens.
    Returns the first tokens ``[k, shapes, draws, STEPS]``; accepted and judged drafts of all steps, and accepted of
    the first, ``[k, shapes, draws]``.
    """
    kinds, shapes = tables.shape[0], len(SHAPES)
    rows = kinds * shapes * draws
    kind = jnp.arange(rows) // (shapes * draws)
    shape = jnp.arange(rows) // draws % shapes
    temperature = jnp.array([s.temperature for s in SHAPES], jnp.float32)
    top_k = jnp.array([s.top_k for s in SHAPES], jnp.int32)
    top_p = jnp.array([s.top_p for s in SHAPES], jnp.float32)
    keys = row_keys(key, rows)

    if probabilistic:

        def log_probs(table, drafted, *options):
            options = [jnp.broadcast_to(o, table.shape[:-1]) for o in options]
            return jnp.where(drafted == 2, jax.nn.log_softmax(table), shape_logits(table, *options))

        by_shape = jax.vmap(log_probs, (None, None, 0, 0, 0))
        tables = jax.vmap(by_shape, (0, 0, None, None, None))(tables, jnp.arange(kinds), temperature, top_k, top_p)

    def step(carry, _):
        tokens, length = carry
        row = jnp.arange(rows)
        context = [tokens[row, length - 2], tokens[row, length - 1]]
        now = step_keys(keys, length)
        both = jax.vmap(partial(jax.random.split, num=DRAFTS + 1))(now)
        probs = []
        for i in range(DRAFTS):
            last = context[-2], context[-1]
            if probabilistic:
                q = tables[kind, shape, *last]
                context.append(jax.vmap(jax.random.categorical)(both[:, i], q).astype(jnp.int32))
                probs.append(jnp.exp(q))
            else:
                # after a -1 the context means nothing, and nothing is looked at
                context.append(tables[kind, *last].astype(jnp.int32))
        drafts = jnp.stack(context[2:], axis=1)
        logits = jnp.stack([jnp.asarray(TARGET)[context[i], context[i + 1]] for i in range(DRAFTS + 1)], axis=1)
        # ragged: every third row has one draft less
        count = jnp.minimum(count_drafts(drafts), DRAFTS - (row % 3 == 0))
        outcome = accept(
            logits,
            drafts,
            count,
            jnp.stack(probs, axis=1) if probabilistic else None,
            both[:, DRAFTS],
            temperature[shape],
            top_k[shape],
            top_p[shape],
            method,
            synthetic_rates,
        )
        column = jnp.arange(DRAFTS + 1)[None]
        place = jnp.where(column < outcome.num_emitted[:, None], length[:, None] + column, tokens.shape[1])
        tokens = tokens.at[row[:, None], place].set(outcome.tokens, mode="drop")
        return (tokens, length + outcome.num_emitted), (outcome.num_accepted_drafts, count)

    tokens = jnp.zeros((rows, 2 + STEPS * (DRAFTS + 1)), jnp.int32).at[:, :2].set(jnp.array(START)[None])
    (tokens, _), (accepted, count) = jax.lax.scan(step, (tokens, jnp.full(rows, 2)), None, length=STEPS)
    by_row = (tokens[:, 2 : 2 + STEPS], accepted.sum(0), count.sum(0), accepted[0])
    return jax.tree.map(lambda x: x.reshape(kinds, shapes, draws, *x.shape[1:]), by_row)
