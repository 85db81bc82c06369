"""A smaller model as the drafter: run token by token, its state advanced through accepted tokens only.

Its cache holds every token of the row but those that the last verify added. A call verifies these as one window (all of
them stand), commits them, and then decodes its drafts from the committed state into a second slot of the row: nothing
is copied, a rejected draft leaves no trace, and no prompt is ever run again.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kda_jax import checkpoint, model
from kda_jax.cache import Cache, make_cache
from kda_jax.config import ModelConfig
from kda_jax.layers.params import ModelParams
from kda_jax.ops.plan import CommitPlan, plan_commit
from kda_jax.speculate.drafter import Draft, DraftContext
from kda_jax.speculate.sampling import best_token, draw, shape_logits

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class DraftModel:
    """A model to draft with: what ``kda_jax.load_drafter`` gives and ``generate(drafter=...)`` takes."""

    config: ModelConfig
    params: ModelParams
    path: Path | None = None

    def drafter(
        self, config: ModelConfig, num_draft_tokens: int, implementation: str | None
    ) -> tuple["ModelDrafter", ModelParams]:
        """The drafter and its parameters for a target of ``config``; ``ValueError`` where they don't fit."""
        if self.config.vocab_size != config.vocab_size:
            raise ValueError(
                f"drafter must have the model's vocabulary of {config.vocab_size} tokens, "
                f"got one of {self.config.vocab_size}"
            )
        return ModelDrafter(num_draft_tokens, self.config, implementation), self.params


def load_drafter(path: str | Path | None = None, *, dtype: Any = None) -> DraftModel:
    """Load a smaller KDA model to draft with, from a folder that ``kda_jax.load`` reads (its tokenizer is not needed).

    Raises ``ValueError`` as ``kda_jax.load`` does, and for ``path=None``: no drafter ships with the package.
    """
    if path is None:
        raise ValueError("path must be a folder with a smaller KDA model: no drafter ships with kda_jax")
    found = checkpoint.load(path, dtype=dtype)
    return DraftModel(found.config, found.params, found.path)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftState:
    """Row b's committed state is in slot ``1 + 2b`` of the cache; slot ``2 + 2b`` holds its drafts' newest."""

    cache: Cache
    computed: Array  # int32 [B]: tokens in the cache


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """The drafter protocol (``drafter.py``) around a model of ``config``; parameters are its ``ModelParams``."""

    num_draft_tokens: int
    config: ModelConfig
    implementation: str | None = None

    def start(self, params: ModelParams, context: DraftContext) -> DraftState:
        batch, size = context.tokens.shape
        window = self.num_draft_tokens + 1
        cache = make_cache(self.config, batch=batch, tokens=size + window, dtype=params.embed.dtype, states_per_row=2)
        tokens = context.tokens if context.prompt_size is None else context.tokens[:, : context.prompt_size]
        computed = jnp.clip(context.lengths - 1, 0, tokens.shape[1])
        slots = jnp.where(computed > 0, _committed(batch), 0)
        _, cache = model.prefill(
            params, self.config, tokens, computed, cache, slots, implementation=self.implementation
        )
        return DraftState(cache, computed)

    def __call__(self, params: ModelParams, state: DraftState, context: DraftContext, keys: Array) -> Draft:
        logits, state = self._catch_up(params, state, context)
        cache, tokens, probs = state.cache, [], []
        committed = _committed(context.lengths.shape[0])
        for i in range(self.num_draft_tokens):
            now = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
            token, q = _choose(logits, now, context)
            tokens.append(token)
            probs.append(q)
            if i + 1 < self.num_draft_tokens:
                source = committed if i == 0 else committed + 1
                logits, cache = self._decode(params, cache, token, state.computed + i, source, committed + 1)
        return Draft(jnp.stack(tokens, axis=1), jnp.stack(probs, axis=1), dataclasses.replace(state, cache=cache))

    def _catch_up(self, params, state: DraftState, context: DraftContext) -> tuple[Array, DraftState]:
        """Commit the tokens that are new: logits [B, vocab] behind the last, and the state that holds them all."""
        window, implementation = self.num_draft_tokens + 1, self.implementation
        new = jnp.clip(context.lengths - state.computed, 0, window)
        place = state.computed[:, None] + jnp.arange(window, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(context.tokens, jnp.minimum(place, context.tokens.shape[1] - 1), axis=1)
        slots = jnp.where(new > 0, _committed(new.shape[0]), 0)
        logits, cache, left = model.verify(
            params, self.config, tokens, new, state.computed, state.cache, slots, implementation=implementation
        )
        plan = plan_commit(new, new, slots)
        cache = model.commit(params, self.config, cache, left, plan, implementation=implementation)
        last = jnp.maximum(new - 1, 0)[:, None, None]
        return jnp.take_along_axis(logits, last, axis=1)[:, 0], DraftState(cache, state.computed + new)

    def _decode(self, params, cache: Cache, token, computed, source, target) -> tuple[Array, Cache]:
        """One token a row, from the state in slots ``source`` to ``target``: logits [B, vocab], the next cache."""
        one, none = jnp.ones_like(source), jnp.zeros_like(source)
        logits, cache, left = model.verify_native(
            params,
            self.config,
            jnp.maximum(token, 0)[:, None],
            one,
            computed,
            cache,
            source,
            target[:, None],
            implementation=self.implementation,
        )
        plan = CommitPlan(one, source, target, none, none, writes_boundaries=False)
        return logits[:, 0], model.commit(params, self.config, cache, left, plan, implementation=self.implementation)


def _committed(batch: int) -> Array:
    return 1 + 2 * jnp.arange(batch, dtype=jnp.int32)


def _choose(logits: Array, keys: Array, context: DraftContext) -> tuple[Array, Array]:
    """A draft of each row, int32 ``[B]``, -1 behind logits that are not numbers, and what it was drawn from ``[B, V]``
    (zeros when every row is greedy: nobody looks)."""
    best, bad = best_token(logits)

    def sampled():
        logp = shape_logits(logits, context.temperature, context.top_k, context.top_p)
        return jnp.where(context.temperature > 0, draw(logp, keys), best), jnp.exp(logp)

    token, probs = lax.cond(jnp.any(context.temperature > 0), sampled, lambda: (best, jnp.zeros_like(logits)))
    return jnp.where(bad, -1, token), probs
