"""The loop inside ``generate``: its state, and the two programs that make and advance it.

``start`` runs prefill and samples the first token; ``advance`` takes up to a traced number of plain or speculative
steps, its state donated. Nothing leaves the device in between.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kda_jax import model
from kda_jax.cache import Cache, make_cache
from kda_jax.config import ModelConfig
from kda_jax.generation_adaptive import Expectation, learn, nothing_known, plan, switch
from kda_jax.layers.params import ModelParams
from kda_jax.metadata import Fold, SpecRows, StepMetadata
from kda_jax.ops.tree import paths
from kda_jax.options import SpeculativeOptions
from kda_jax.speculate.drafter import Draft, DraftContext, count_drafts
from kda_jax.speculate.rejection import accept
from kda_jax.speculate.sampling import row_keys, sample, step_keys
from kda_jax.speculate.tree import accept_tree, window_parents


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateStats:
    """Counts per row. Acceptance length is ``(emitted - 1) / steps``: prefill's token belongs to no step.

    Position i of a tree is depth i: drafted where the tree has a draft that deep, accepted where one stood.
    """

    steps: jax.Array  # int32 [B]: verify steps (plain: decode steps) while the row was live
    drafted: jax.Array  # int32 [B, m]: how often a draft was judged at each position, the anchor row not counted
    accepted: jax.Array  # int32 [B, m]: how often it became output
    nan: jax.Array  # bool [B]: the row ended early because its logits held NaN (or +inf): nothing was sampled there
    rejection: str | None = dataclasses.field(default=None, metadata={"static": True})  # None: plain decoding

    @property
    def acceptance(self) -> jax.Array:
        """Share of the drafts at each position that became output, fp32 [B, m]; NaN where none was judged."""
        return ratio(self.accepted, self.drafted)

    @property
    def overall_acceptance(self) -> jax.Array:
        """The same over all rows, fp32 [m]."""
        return ratio(jnp.sum(self.accepted, axis=0), jnp.sum(self.drafted, axis=0))


def ratio(part, whole) -> jax.Array:
    """``part / whole`` fp32, NaN where ``whole`` is 0."""
    return jnp.where(whole > 0, part / jnp.maximum(whole, 1), jnp.nan).astype(jnp.float32)


class Sampling(NamedTuple):
    temperature: jax.Array  # [B]
    top_k: jax.Array | None
    top_p: jax.Array | None
    stop_tokens: jax.Array  # [S]
    limit: jax.Array  # int32 []: max_new_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoopState:
    """The loop's state. ``tokens[:, :lengths]`` is prompt and output; all but the last of those are in the cache."""

    cache: Cache
    tokens: jax.Array  # int32 [B, S]
    lengths: jax.Array  # int32 [B]
    emitted: jax.Array  # int32 [B]
    done: jax.Array  # bool [B]
    last_accepted: jax.Array  # int32 [B]: rows the last step committed; native mode reads its state there
    keys: jax.Array  # [B]
    drafter: Any
    stats: GenerateStats
    expectation: Expectation | None = None  # None: every draft is verified


class Program(NamedTuple):
    """Everything static about a run."""

    config: ModelConfig
    implementation: str | None
    new_tokens: int  # bucket of the output
    speculative: SpeculativeOptions | None
    drafter: Any

    @property
    def recovers(self) -> bool:
        return self.speculative is not None and self.speculative.recover

    @property
    def states_per_row(self) -> int:
        return 1 if self.speculative is None or self.speculative.recover else self.speculative.window


def _emit(state: LoopState, tokens, count, sampling: Sampling) -> tuple[LoopState, jax.Array]:
    """Append up to ``count`` [B] of ``tokens`` [B, W] to live rows, ending at a stop token or the limit.

    Returns the state and how many tokens each row really emitted.
    """
    batch, width = tokens.shape
    column = jnp.arange(width)[None]
    is_stop = jnp.any(tokens[..., None] == sampling.stop_tokens[None, None], axis=-1) & (column < count[:, None])
    first_stop = jnp.min(jnp.where(is_stop, column, width), axis=1)
    count = jnp.minimum(jnp.minimum(count, first_stop + 1), sampling.limit - state.emitted)
    count = jnp.where(state.done, 0, count)
    position = jnp.where(column < count[:, None], state.lengths[:, None] + column, state.tokens.shape[1])
    buffer = state.tokens.at[jnp.arange(batch)[:, None], position].set(tokens, mode="drop")
    emitted = state.emitted + count
    done = state.done | (first_stop < count) | (emitted >= sampling.limit)
    state = dataclasses.replace(state, tokens=buffer, lengths=state.lengths + count, emitted=emitted, done=done)
    return state, count


def _slots(state: LoopState, program: Program):
    """The first slot of each live row, 0 for rows that have ended."""
    first = 1 + jnp.arange(state.done.shape[0], dtype=jnp.int32) * program.states_per_row
    return jnp.where(state.done, 0, first)


def _note_nan(state: LoopState, nan) -> LoopState:
    nan = nan & ~state.done
    return dataclasses.replace(
        state, done=state.done | nan, stats=dataclasses.replace(state.stats, nan=state.stats.nan | nan)
    )


@functools.partial(jax.jit, static_argnames="program")
def start(params: ModelParams, tokens, lengths, key, sampling: Sampling, drafter_params, *, program: Program):
    config = program.config
    batch, prompt = tokens.shape
    drafts = 0 if program.speculative is None else program.speculative.num_draft_tokens
    size = prompt + program.new_tokens + drafts  # a window is cached whole, even where it can't all become output
    window = program.speculative.window if program.recovers else None
    cache = make_cache(
        config, batch=batch, tokens=size, dtype=params.embed.dtype, states_per_row=program.states_per_row, window=window
    )
    live = lengths > 0
    slots = jnp.where(live, 1 + jnp.arange(batch, dtype=jnp.int32) * program.states_per_row, 0)
    pending, cache = cache.pending, dataclasses.replace(cache, pending=None)
    logits, cache = model.prefill(params, config, tokens, lengths, cache, slots, implementation=program.implementation)
    cache = dataclasses.replace(cache, pending=pending)
    zeros = jnp.zeros((batch,), jnp.int32)
    counts = jnp.zeros((batch, drafts), jnp.int32)
    keys = row_keys(key, batch)
    state = LoopState(
        cache=cache,
        tokens=jnp.pad(tokens, [(0, 0), (0, program.new_tokens)]),
        lengths=lengths,
        emitted=zeros,
        done=~live,
        last_accepted=zeros + 1,
        keys=keys,
        drafter=None,
        stats=GenerateStats(
            zeros, counts, counts, ~live & False, rejection=program.speculative and program.speculative.rejection
        ),
    )
    token, nan = sample(logits, step_keys(keys, zeros), sampling.temperature, sampling.top_k, sampling.top_p)
    state, _ = _emit(_note_nan(state, nan), token[:, None], zeros + 1, sampling)
    if program.speculative is not None and program.speculative.adaptive:
        state = dataclasses.replace(state, expectation=nothing_known(batch, drafts))
    if program.drafter is not None:
        context = _context(state, sampling, program)
        state = dataclasses.replace(state, drafter=program.drafter.start(drafter_params, context))
    return state


def with_drafter(state: LoopState, drafter_state) -> LoopState:
    return dataclasses.replace(state, drafter=drafter_state)


def _context(state: LoopState, sampling: Sampling, program: Program) -> DraftContext:
    prompt_size = state.tokens.shape[1] - program.new_tokens
    options = sampling.temperature, sampling.top_k, sampling.top_p
    return DraftContext(state.tokens, state.lengths, *options, prompt_size)


def _last_tokens(state: LoopState):
    return jnp.take_along_axis(state.tokens, jnp.maximum(state.lengths - 1, 0)[:, None], axis=1)


def _plain_step(params, state: LoopState, sampling: Sampling, program: Program) -> LoopState:
    logits, cache = model.decode(
        params,
        program.config,
        _last_tokens(state)[:, 0],
        state.lengths - 1,
        state.cache,
        _slots(state, program),
        implementation=program.implementation,
    )
    keys = step_keys(state.keys, state.emitted)
    token, nan = sample(logits, keys, sampling.temperature, sampling.top_k, sampling.top_p)
    steps = state.stats.steps + ~state.done
    state = dataclasses.replace(state, cache=cache, stats=dataclasses.replace(state.stats, steps=steps))
    return _emit(_note_nan(state, nan), token[:, None], jnp.ones_like(state.emitted), sampling)[0]


def make_drafts(drafter_params, state: LoopState, sampling: Sampling, program: Program):
    """The ``Draft``, and how many of its drafts each row verifies, int32 [B]: no deeper than its output can take."""
    keys = step_keys(jax.vmap(lambda key: jax.random.fold_in(key, 1))(state.keys), state.emitted)
    draft = program.drafter(drafter_params, state.drafter, _context(state, sampling, program), keys)
    room = jnp.maximum(sampling.limit - state.emitted - 1, 0)
    if draft.parents is None:
        count = jnp.minimum(count_drafts(draft.tokens), room)
    else:
        program.speculative.check_tree()
        way = _ways(draft)
        gone = jnp.any(way & (draft.tokens < 0)[:, None], axis=2) | (jnp.sum(way, axis=2) > room[:, None])
        draft = draft._replace(tokens=jnp.where(gone, -1, draft.tokens))
        count = count_drafts(draft.tokens, draft.parents)
    return draft, jnp.where(state.done, 0, count)


def _ways(draft: Draft):
    """Which drafts of a tree lead to each, itself included: bool [B, m, m]."""
    return paths(window_parents(draft.parents))[:, 1:, 1:]


def _judged_positions(draft: Draft, num_draft, options: SpeculativeOptions):
    """Whether a draft is judged at each position, bool [B, m]."""
    position = jnp.arange(options.num_draft_tokens)[None]
    if draft.parents is None:
        return position < num_draft[:, None]
    real = (draft.tokens >= 0) & (position < num_draft[:, None])
    depth = jnp.sum(_ways(draft), axis=2)
    return jnp.any(real[:, None] & (depth[:, None] == position[..., None] + 1), axis=2)


def _speculative_step(
    params, drafter_params, state: LoopState, sampling: Sampling, costs, program: Program
) -> LoopState:
    options, config, implementation = program.speculative, program.config, program.implementation
    draft, num_draft = make_drafts(drafter_params, state, sampling, program)
    size = None
    if options.adaptive:
        room = jnp.maximum(sampling.limit - state.emitted - 1, 0)
        num_draft, size = plan(state.expectation, draft.confidence, num_draft, room, ~state.done, costs)
    parents = None if draft.parents is None else window_parents(draft.parents)
    slots, width = _slots(state, program), options.window
    window = jnp.concatenate([_last_tokens(state), jnp.maximum(draft.tokens, 0)], axis=1)
    targets = None
    if not options.recover:
        targets = jnp.where((slots > 0)[:, None], slots[:, None] + jnp.arange(width)[None], 0)
        slots = jnp.where(slots > 0, slots + jnp.maximum(state.last_accepted, 1) - 1, 0)
    rows = SpecRows(
        request_rows=jnp.arange(slots.shape[0], dtype=jnp.int32),
        lengths=jnp.where(state.done, 0, 1 + num_draft),
        computed=state.lengths - 1,
        slots=slots,
        target_slots=targets,
        fold=Fold() if options.recover else None,
        parents=parents,
        window=width,
    )

    def verify(rows):
        metadata = StepMetadata(spec=rows)
        return model.step(params, config, state.cache, window, metadata, implementation=implementation)

    logits, cache, left = verify(rows) if size is None else switch(verify, size, rows)
    keys, shape = step_keys(state.keys, state.emitted), (sampling.temperature, sampling.top_k, sampling.top_p)
    if parents is None:
        how = {"method": options.rejection, "synthetic_rates": options.acceptance_rates}
        judged = accept(logits, draft.tokens, num_draft, draft.probs, keys, *shape, **how)
    else:
        judged = accept_tree(logits, draft.tokens, draft.parents, num_draft, draft.probs, keys, *shape)
    live, position = ~state.done, jnp.arange(options.num_draft_tokens)[None]
    state, count = _emit(with_drafter(state, draft.state), judged.tokens, judged.num_emitted, sampling)
    kept = jnp.minimum(judged.num_accepted_drafts, count)
    stats = dataclasses.replace(
        state.stats,
        steps=state.stats.steps + live,
        drafted=state.stats.drafted + _judged_positions(draft, num_draft, options),
        accepted=state.stats.accepted + (position < kept[:, None]),
    )
    commit_plan = model.plan_rows(rows, count)
    if parents is not None:
        cache, left = model.keep_path(cache, left, rows, judged.path, count)
    if options.recover:
        cache = model.defer(cache, left, commit_plan)
    else:
        cache = model.commit(params, config, cache, left, commit_plan, implementation=implementation)
    if options.adaptive:
        known = learn(state.expectation, draft.confidence, num_draft, judged.num_accepted_drafts)
        state = dataclasses.replace(state, expectation=known)
    state = dataclasses.replace(
        state,
        cache=cache,
        last_accepted=jnp.where(count > 0, count, state.last_accepted),
        stats=stats,
    )
    return _note_nan(state, judged.nan)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def advance(
    params: ModelParams, state: LoopState, sampling: Sampling, drafter_params, steps, costs=None, *, program: Program
):
    """Up to ``steps`` (int32 []) steps, fewer when every row has ended. Nothing leaves the device. ``costs`` fp32 [n]
    is for adaptive verification (``generation_adaptive.plan``)."""

    def unfinished(carry):
        state, step = carry
        return (step < steps) & ~jnp.all(state.done)

    def step(carry):
        state, step = carry
        if program.speculative is None:
            state = _plain_step(params, state, sampling, program)
        else:
            state = _speculative_step(params, drafter_params, state, sampling, costs, program)
        return state, step + 1

    return jax.lax.while_loop(unfinished, step, (state, jnp.int32(0)))[0]
