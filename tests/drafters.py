"""Drafters for tests, and what a run must count when its drafts are known beforehand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.speculate.drafter import Draft
from kda_jax.speculate.sampling import shape_logits


@dataclasses.dataclass(frozen=True)
class Script:
    """Drafts what its parameters say, int32 ``[B, S]``: the draft for each position of each row, -1 for none.

    It keeps the length it saw last, and a digest of the tokens up to there, by adding up the tokens that are new since.
    It falls silent for good when it was not called after every step, when more than ``num_draft_tokens + 1`` tokens are
    new, or when tokens seen before have changed: a run whose drafts all stand shows that the loop keeps its promises.
    """

    num_draft_tokens: int

    def start(self, params, context):
        return context.lengths, _digest(context.tokens, context.lengths)

    def __call__(self, params, state, context, keys):
        seen, digest = state
        new = context.lengths - seen
        newest = jnp.arange(self.num_draft_tokens + 1)[None] + seen[:, None]
        added = _digest_at(context.tokens, newest, newest < context.lengths[:, None])
        digest = digest + added
        fine = (new >= 0) & (new <= self.num_draft_tokens + 1) & (digest == _digest(context.tokens, context.lengths))
        seen = jnp.where(fine, context.lengths, -(10**6))
        position = context.lengths[:, None] + jnp.arange(self.num_draft_tokens)[None]
        inside = (position < params.shape[1]) & fine[:, None]
        drafts = jnp.take_along_axis(params, jnp.minimum(position, params.shape[1] - 1), axis=1)
        return Draft(jnp.where(inside, drafts, -1), None, (seen, digest))


def _digest_at(tokens, positions, counted):
    values = jnp.take_along_axis(tokens, jnp.clip(positions, 0, tokens.shape[1] - 1), axis=1)
    return jnp.sum(jnp.where(counted, (values + 1) * (positions + 1) ** 2, 0), axis=1)


def _digest(tokens, lengths):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return _digest_at(tokens, positions, positions < lengths[:, None])


@dataclasses.dataclass(frozen=True)
class Table:
    """Samples each draft from a table, logits fp32 ``[V, V]`` of a token given the one before, shaped as the row is."""

    num_draft_tokens: int

    def start(self, params, context):
        return None

    def __call__(self, params, state, context, keys):
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        tokens, probs = [], []
        for i in range(self.num_draft_tokens):
            logp = shape_logits(params[last], context.temperature, context.top_k, context.top_p)
            now = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
            last = jax.vmap(jax.random.categorical)(now, logp).astype(jnp.int32)
            tokens.append(last)
            probs.append(jnp.exp(logp))
        return Draft(jnp.stack(tokens, axis=1), jnp.stack(probs, axis=1), state)


KINDS = ("right", "wrong", "half right", "silent", "mixed")


def script(kind: str, sequence: np.ndarray, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """One row of ``Script``'s parameters, made from the tokens ``sequence`` int32 ``[S]`` that the row will hold."""
    wrong = (sequence + rng.integers(1, vocab, sequence.shape)) % vocab
    choice = {
        "right": np.zeros_like(sequence),
        "wrong": np.ones_like(sequence),
        "half right": rng.integers(0, 2, sequence.shape),
        "silent": np.full_like(sequence, 2),
        "mixed": rng.choice(3, sequence.shape, p=(0.7, 0.2, 0.1)),
    }[kind]
    return np.where(choice == 0, sequence, np.where(choice == 1, wrong, -1)).astype(np.int32)


def expected_counts(output, drafts, drafts_per_step: int, limit: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Steps, and drafts judged and accepted by position, of one greedy row.

    ``output`` is what it emits (all of it, ending with a stop token or at ``limit``); ``drafts[i]`` the draft for the
    place of ``output[i]``, -1 for none, given for ``limit`` places.
    """
    steps, drafted, accepted = 0, np.zeros(drafts_per_step, int), np.zeros(drafts_per_step, int)
    emitted = 1
    while emitted < len(output):
        given = list(drafts[emitted : emitted + min(drafts_per_step, limit - emitted - 1)])
        judged = given.index(-1) if -1 in given else len(given)
        right = 0
        while right < judged and emitted + right < len(output) and given[right] == output[emitted + right]:
            right += 1
        steps += 1
        drafted[:judged] += 1
        accepted[:right] += 1
        emitted += right + 1
    return steps, drafted, accepted


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree of known drafts. Parameters: the tokens the row will hold, int32 ``[B, S]``, and a choice for each place
    and draft, int32 ``[B, S, m]``: 0 the right token, 1 or 2 another, -1 none."""

    parents: tuple[int, ...]
    vocab: int

    @property
    def num_draft_tokens(self):
        return len(self.parents)

    def start(self, params, context):
        return None

    def __call__(self, params, state, context, keys):
        sequence, choice = params
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        position = context.lengths[:, None] + jnp.array(depths[1:])[None] - 1
        right = jnp.take_along_axis(sequence, jnp.minimum(position, sequence.shape[1] - 1), axis=1)
        now = jnp.minimum(context.lengths, sequence.shape[1] - 1)
        choice = jnp.take_along_axis(choice, now[:, None, None], axis=1)[:, 0]
        tokens = jnp.where(choice < 0, -1, (right + choice) % self.vocab)
        parents = jnp.broadcast_to(jnp.array(self.parents)[None], tokens.shape)
        return Draft(tokens, None, state, parents)


@dataclasses.dataclass(frozen=True)
class AsTree:
    """Another drafter's chain, called a tree."""

    drafter: object

    @property
    def num_draft_tokens(self):
        return self.drafter.num_draft_tokens

    def start(self, params, context):
        return self.drafter.start(params, context)

    def __call__(self, params, state, context, keys):
        draft = self.drafter(params, state, context, keys)
        chain = jnp.broadcast_to(jnp.arange(draft.tokens.shape[1])[None], draft.tokens.shape)
        return draft._replace(parents=chain)


@dataclasses.dataclass(frozen=True)
class TreeTable:
    """``Table`` along the branches of a tree; siblings are drawn without replacement."""

    parents: tuple[int, ...]

    @property
    def num_draft_tokens(self):
        return len(self.parents)

    def start(self, params, context):
        return None

    def __call__(self, params, state, context, keys):
        drawn = [jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]]
        probs = []
        for i, parent in enumerate(self.parents):
            # nothing is drafted behind a draft that is not there
            above = jnp.maximum(drawn[parent], 0)
            logp = shape_logits(params[above], context.temperature, context.top_k, context.top_p)
            elder = [drawn[j + 1] for j in range(i) if self.parents[j] == parent]
            for token in elder:
                logp = jnp.where(jnp.arange(logp.shape[1])[None] == token[:, None], -jnp.inf, logp)
            none = jnp.max(logp, axis=1) == -jnp.inf
            logp = jax.nn.log_softmax(jnp.where(none[:, None], 0.0, logp), axis=1)
            now = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
            token = jax.vmap(jax.random.categorical)(now, logp).astype(jnp.int32)
            drawn.append(jnp.where(none | (drawn[parent] < 0), -1, token))
            probs.append(jnp.exp(logp))
        tokens = jnp.stack(drawn[1:], axis=1)
        parents = jnp.broadcast_to(jnp.array(self.parents)[None], tokens.shape)
        return Draft(tokens, jnp.stack(probs, axis=1), state, parents)
