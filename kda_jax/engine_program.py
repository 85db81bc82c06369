"""The engine's device side: one step of the model, sampling and acceptance, and the commit or its deferral."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kda_jax import model
from kda_jax.cache import Cache, PendingCommit
from kda_jax.config import ModelConfig
from kda_jax.engine_drafter import Drafting
from kda_jax.layers.params import ModelParams
from kda_jax.metadata import StepMetadata
from kda_jax.options import SpeculativeOptions
from kda_jax.speculate.adaptive import allocate
from kda_jax.speculate.drafter import count_drafts
from kda_jax.speculate.rejection import accept
from kda_jax.speculate.sampling import sample, step_keys
from kda_jax.speculate.seats import DraftRows, Seats


class RowSampling(NamedTuple):
    """How each batch row's tokens are chosen; [B]."""

    key_data: jax.Array  # uint32 [B, ...]: the row's key
    emitted: jax.Array  # int32: tokens emitted so far, which number its draws
    temperature: jax.Array  # fp32
    top_k: jax.Array | None  # int32; None: no row has one
    top_p: jax.Array | None  # fp32
    num_draft: jax.Array  # int32: drafts in the row's window, at most where the drafter's are made here
    first: jax.Array  # bool: the token after a prompt, which no draft precedes
    seat: jax.Array | None  # int32: where the drafter keeps the row, out of range for nowhere; None: no drafter here
    budget: jax.Array | None = None  # int32 []: most drafts verified, the likeliest; None: all
    confidence: jax.Array | None = None  # fp32 [B, m]: what is expected of drafts whose drafter doesn't say


@functools.partial(
    jax.jit,
    static_argnames=("config", "speculative", "drafting", "defer", "implementation"),
    donate_argnames=("cache", "seats"),
)
def run_step(
    params: ModelParams,
    cache: Cache,
    pending: PendingCommit | None,
    tokens,
    metadata: StepMetadata,
    rows: RowSampling,
    drafter_params: Any,
    seats: Seats | None,
    *,
    config: ModelConfig,
    speculative: SpeculativeOptions | None,
    drafting: Drafting | None,
    defer: bool,
    implementation: str | None,
) -> tuple[Cache, Seats | None, jax.Array]:
    """One step. ``cache`` and ``seats`` are donated; a pending commit is given apart, since its buffers can't be used
    again. With ``drafting`` the drafts in ``tokens`` are made here. The array that comes back is all the host reads:
    int32 [B, W + 3], each row's tokens, how many drafts were judged, how many of the tokens count, and whether its
    logits were not numbers (then none do). Under a budget m more columns are behind the tokens: the bits of the
    confidences that the drafter gave, -1.0 where it gave none."""
    cache = dataclasses.replace(cache, pending=pending)
    num_draft, probs, confidence = rows.num_draft, None, None
    if drafting is not None and metadata.spec is not None:
        made = _make_drafts(drafter_params, seats, tokens, metadata, rows, drafting)
        tokens, num_draft, probs, confidence, seats = made
    if rows.budget is not None:
        expected = rows.confidence if confidence is None else confidence
        metadata, num_draft = _within_budget(metadata, num_draft, expected, rows.budget)
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
        judged = accept(logits, drafts, num_draft, probs, keys, *shape, **how)
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
    if rows.seat is not None:
        seats = drafting.seated.absorb(seats, rows.seat, out, count)
    read = [out, num_draft[:, None], count[:, None], nan[:, None].astype(jnp.int32)]
    if rows.budget is not None:
        said = jnp.full_like(rows.confidence, -1.0) if confidence is None else jnp.nan_to_num(confidence)
        read.insert(1, jax.lax.bitcast_convert_type(said.astype(jnp.float32), jnp.int32))
    return cache, seats, jnp.concatenate(read, axis=1)


def _make_drafts(drafter_params, seats: Seats, tokens, metadata: StepMetadata, rows: RowSampling, drafting: Drafting):
    """``tokens`` with drafts in the windows; in batch order how many each row has [B], their probabilities [B, m, V]
    and confidences [B, m]; and the seats."""
    at, batch = metadata.spec.request_rows, tokens.shape[0]

    def of(x):
        return None if x is None else jnp.take(x, at, axis=0, mode="clip")

    def back(x):
        return None if x is None else jnp.zeros((batch, *x.shape[1:]), x.dtype).at[at].set(x, mode="drop")

    keys = jax.vmap(lambda data: jax.random.fold_in(jax.random.wrap_key_data(data), 1))(of(rows.key_data))
    keys = jax.vmap(jax.random.key_data)(step_keys(keys, of(rows.emitted)))
    seat = jnp.where(at < batch, of(rows.seat), drafting.seated.num_seats)
    asked = DraftRows(seat, keys, of(rows.temperature), of(rows.top_k), of(rows.top_p))
    made, seats = drafting.seated.draft(drafter_params, seats, asked, in_place=drafting.in_place)
    drafts = made.tokens
    num_draft = rows.num_draft.at[at].min(count_drafts(drafts), mode="drop")
    fits = min(drafts.shape[1], tokens.shape[1] - 1)
    tokens = tokens.at[at, 1 : 1 + fits].set(jnp.maximum(drafts[:, :fits], 0), mode="drop")
    return tokens, num_draft, back(made.probs), back(made.confidence), seats


def _within_budget(metadata: StepMetadata, num_draft, confidence, budget):
    """The step with windows of the drafts that are worth it, and how many each row has [B]."""
    num_draft = allocate(confidence, num_draft, budget)
    spec, batch = metadata.spec, num_draft.shape[0]
    drafts = jnp.take(num_draft, spec.request_rows, mode="clip")
    lengths = jnp.where(spec.request_rows < batch, jnp.minimum(spec.lengths, 1 + drafts), spec.lengths)
    return dataclasses.replace(metadata, spec=dataclasses.replace(spec, lengths=lengths)), num_draft


@functools.partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames=("cache",))
def fold(
    params: ModelParams, cache: Cache, pending: PendingCommit, *, config: ModelConfig, implementation: str | None
) -> Cache:
    """The cache with ``pending`` written; ``cache`` is donated."""
    cache = dataclasses.replace(cache, pending=pending)
    return model.fold(params, config, cache, implementation=implementation)
