"""The engine's device side: one step of the model, sampling and acceptance, and the commit or its deferral."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kda_jax import model
from kda_jax.cache import Cache, PendingCommit
from kda_jax.config import ModelConfig
from kda_jax.layers.params import ModelParams
from kda_jax.metadata import StepMetadata
from kda_jax.options import SpeculativeOptions
from kda_jax.speculate.rejection import accept
from kda_jax.speculate.sampling import sample, step_keys


class RowSampling(NamedTuple):
    """How each batch row's tokens are chosen; [B]."""

    key_data: jax.Array  # uint32 [B, ...]: the row's key
    emitted: jax.Array  # int32: tokens emitted so far, which number its draws
    temperature: jax.Array  # fp32
    top_k: jax.Array | None  # int32; None: no row has one
    top_p: jax.Array | None  # fp32
    num_draft: jax.Array  # int32
    first: jax.Array  # bool: the token after a prompt, which no draft precedes


@functools.partial(
    jax.jit,
    static_argnames=("config", "speculative", "defer", "implementation"),
    donate_argnames=("cache",),
)
def run_step(
    params: ModelParams,
    cache: Cache,
    pending: PendingCommit | None,
    tokens,
    metadata: StepMetadata,
    rows: RowSampling,
    *,
    config: ModelConfig,
    speculative: SpeculativeOptions | None,
    defer: bool,
    implementation: str | None,
) -> tuple[Cache, jax.Array]:
    """One step. ``cache`` is donated; a pending commit is given apart, since its buffers can't be used again. The array
    that comes back is all the host reads: int32 [B, W + 2], each row's tokens, how many of them
    count, and whether its logits were not numbers (then none do)."""
    cache = dataclasses.replace(cache, pending=pending)
    logits, cache, left = model.step(params, config, cache, tokens, metadata, implementation=implementation)
    keys = step_keys(jax.vmap(jax.random.wrap_key_data)(rows.key_data), rows.emitted)
    shape = rows.temperature, rows.top_k, rows.top_p
    token, nan = sample(logits[:, 0], keys, *shape)
    out, count = token[:, None], jnp.where(nan, 0, 1)
    if speculative is not None:
        width = speculative.window
        # one window's width for every composition, so that a row draws the same numbers in each
        logits = jnp.pad(logits, [(0, 0), (0, width - logits.shape[1]), (0, 0)])
        drafts = jnp.pad(tokens, [(0, 0), (0, max(width - tokens.shape[1], 0))])[:, 1:width]
        how = {"method": speculative.rejection, "synthetic_rates": speculative.acceptance_rates}
        judged = accept(logits, drafts, rows.num_draft, None, keys, *shape, **how)
        count = jnp.where(rows.first, count, judged.num_emitted)
        nan = jnp.where(rows.first, nan, judged.nan)
        first = jnp.pad(out, [(0, 0), (0, width - 1)])
        out = jnp.where(rows.first[:, None], first, judged.tokens)
    if left is not None:
        accepted = jnp.take(count, metadata.spec.request_rows, mode="clip")
        plan = model.plan_rows(metadata.spec, accepted)
        if defer:
            cache = model.defer(cache, left, plan)
        else:
            cache = model.commit(params, config, cache, left, plan, implementation=implementation)
    return cache, jnp.concatenate([out, count[:, None], nan[:, None].astype(jnp.int32)], axis=1)


@functools.partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames=("cache",))
def fold(
    params: ModelParams, cache: Cache, pending: PendingCommit, *, config: ModelConfig, implementation: str | None
) -> Cache:
    """The cache with ``pending`` written; ``cache`` is donated."""
    cache = dataclasses.replace(cache, pending=pending)
    return model.fold(params, config, cache, implementation=implementation)
