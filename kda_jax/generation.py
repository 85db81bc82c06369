"""The compiled generate: prefill, then one loop on the device until every row has ended.

Two programs per bucket of batch, prompt and output sizes: ``_start`` (prefill and first token) and ``_advance`` (the
loop, with a traced limit on its steps, its state donated). ``generate`` runs the loop to the end, ``stream`` in slices.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import model, ops
from kda_jax.cache import Cache, make_cache
from kda_jax.config import ModelConfig
from kda_jax.layers.params import ModelParams
from kda_jax.ops._couplings import next_power_of_two
from kda_jax.options import GenerateOptions, SpeculativeOptions
from kda_jax.speculate.drafter import DraftContext, count_drafts
from kda_jax.speculate.ngram import NgramDrafter
from kda_jax.speculate.rejection import accept
from kda_jax.speculate.sampling import row_keys, sample, step_keys

MIN_PROMPT_BUCKET = 16
_NO_LIMIT = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateStats:
    """Counts per row. Acceptance length is ``(emitted - 1) / steps``: prefill's token belongs to no step."""

    steps: jax.Array  # int32 [B]: verify steps (plain: decode steps) while the row was live
    drafted: jax.Array  # int32 [B, m]: how often a draft was judged at each position, the anchor row not counted
    accepted: jax.Array  # int32 [B, m]: how often it became output
    nan: jax.Array  # bool [B]: the row ended early because its logits held NaN (or +inf): nothing was sampled there
    rejection: str | None = dataclasses.field(default=None, metadata={"static": True})  # None: plain decoding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateResult:
    tokens: jax.Array  # int32 [B, max_new_tokens], 0 after a row's end
    lengths: jax.Array  # int32 [B]: emitted tokens, a stop token included
    stats: GenerateStats


class StreamChunk(NamedTuple):
    """What ``stream`` yields: ``tokens``, per row the new token ids (numpy int32); ``finished`` bool [B]; ``stats`` so
    far (numpy leaves)."""

    tokens: list[np.ndarray]
    finished: np.ndarray
    stats: GenerateStats


class _Sampling(NamedTuple):
    temperature: jax.Array  # [B]
    top_k: jax.Array | None
    top_p: jax.Array | None
    stop_tokens: jax.Array  # [S]
    limit: jax.Array  # int32 []: max_new_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
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


class _Program(NamedTuple):
    """Everything static about a run."""

    config: ModelConfig
    implementation: str | None
    new_tokens: int  # bucket of the output
    speculative: SpeculativeOptions | None
    drafter: Any

    @property
    def native_window(self) -> int:
        native = self.speculative is not None and not self.speculative.recover
        return self.speculative.window if native else 1


def _emit(state: _State, tokens, count, sampling: _Sampling) -> tuple[_State, jax.Array]:
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


def _slots(state: _State):
    """Each live row's slot, 0 for rows that have ended."""
    return jnp.where(state.done, 0, 1 + jnp.arange(state.done.shape[0], dtype=jnp.int32))


def _note_nan(state: _State, nan) -> _State:
    nan = nan & ~state.done
    return dataclasses.replace(
        state, done=state.done | nan, stats=dataclasses.replace(state.stats, nan=state.stats.nan | nan)
    )


@functools.partial(jax.jit, static_argnames="program")
def _start(params: ModelParams, tokens, lengths, key, sampling: _Sampling, drafter_params, *, program: _Program):
    config, window = program.config, program.native_window
    batch, prompt = tokens.shape
    drafts = 0 if program.speculative is None else program.speculative.num_draft_tokens
    size = prompt + program.new_tokens + drafts  # a window is cached whole, even where it can't all become output
    cache = make_cache(config, batch=batch, tokens=size, dtype=params.embed.dtype, states_per_row=window)
    row = jnp.arange(batch, dtype=jnp.int32)
    live = lengths > 0
    state_slots, conv_slots = jnp.where(live, 1 + row * window, 0), jnp.where(live, 1 + row, 0)
    logits, cache = model.prefill(
        params, config, tokens, lengths, cache, state_slots, conv_slots, implementation=program.implementation
    )
    zeros = jnp.zeros((batch,), jnp.int32)
    counts = jnp.zeros((batch, drafts), jnp.int32)
    keys = row_keys(key, batch)
    state = _State(
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
    if program.drafter is not None:
        state = dataclasses.replace(state, drafter=program.drafter.start(drafter_params, _context(state, sampling)))
    return state


def _context(state: _State, sampling: _Sampling) -> DraftContext:
    return DraftContext(state.tokens, state.lengths, sampling.temperature, sampling.top_k, sampling.top_p)


def _last_tokens(state: _State):
    return jnp.take_along_axis(state.tokens, jnp.maximum(state.lengths - 1, 0)[:, None], axis=1)


def _plain_step(params, state: _State, sampling: _Sampling, program: _Program) -> _State:
    logits, cache = model.decode(
        params,
        program.config,
        _last_tokens(state)[:, 0],
        state.lengths - 1,
        state.cache,
        _slots(state),
        implementation=program.implementation,
    )
    keys = step_keys(state.keys, state.emitted)
    token, nan = sample(logits, keys, sampling.temperature, sampling.top_k, sampling.top_p)
    steps = state.stats.steps + ~state.done
    state = dataclasses.replace(state, cache=cache, stats=dataclasses.replace(state.stats, steps=steps))
    return _emit(_note_nan(state, nan), token[:, None], jnp.ones_like(state.emitted), sampling)[0]


def _draft(drafter_params, state: _State, sampling: _Sampling, program: _Program):
    """Drafts int32 [B, m], how many of them each row's output can still take, their probabilities, drafter state."""
    keys = step_keys(jax.vmap(lambda key: jax.random.fold_in(key, 1))(state.keys), state.emitted)
    draft = program.drafter(drafter_params, state.drafter, _context(state, sampling), keys)
    room = jnp.maximum(sampling.limit - state.emitted - 1, 0)
    count = jnp.where(state.done, 0, jnp.minimum(count_drafts(draft.tokens), room))
    return draft.tokens, count, draft.probs, draft.state


def _speculative_step(params, drafter_params, state: _State, sampling: _Sampling, program: _Program) -> _State:
    options, config, implementation = program.speculative, program.config, program.implementation
    drafts, num_draft, probs, drafter_state = _draft(drafter_params, state, sampling, program)
    slots, computed = _slots(state), state.lengths - 1
    window = jnp.concatenate([_last_tokens(state), jnp.maximum(drafts, 0)], axis=1)
    lengths = jnp.where(state.done, 0, 1 + num_draft)
    if options.recover:
        logits, cache, left = model.verify(
            params, config, window, lengths, computed, state.cache, slots, implementation=implementation
        )
    else:
        first = jnp.where(slots > 0, 1 + (slots - 1) * options.window, 0)
        source = jnp.where(slots > 0, first + jnp.maximum(state.last_accepted, 1) - 1, 0)
        targets = jnp.where((slots > 0)[:, None], first[:, None] + jnp.arange(options.window)[None], 0)
        logits, cache, left = model.verify_native(
            params,
            config,
            window,
            lengths,
            computed,
            state.cache,
            source,
            targets,
            slots,
            implementation=implementation,
        )
    judged = accept(
        logits,
        drafts,
        num_draft,
        probs,
        step_keys(state.keys, state.emitted),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        method=options.rejection,
        synthetic_rates=options.acceptance_rates,
    )
    live, position = ~state.done, jnp.arange(options.num_draft_tokens)[None]
    state, count = _emit(dataclasses.replace(state, drafter=drafter_state), judged.tokens, judged.num_emitted, sampling)
    kept = jnp.minimum(judged.num_accepted_drafts, count)
    stats = dataclasses.replace(
        state.stats,
        steps=state.stats.steps + live,
        drafted=state.stats.drafted + (position < num_draft[:, None]),
        accepted=state.stats.accepted + (position < kept[:, None]),
    )
    plan = ops.plan_commit(count, lengths, slots)
    state = dataclasses.replace(
        state,
        cache=model.commit(params, config, cache, left, plan, implementation=implementation),
        last_accepted=jnp.where(count > 0, count, state.last_accepted),
        stats=stats,
    )
    return _note_nan(state, judged.nan)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def _advance(params: ModelParams, state: _State, sampling: _Sampling, drafter_params, steps, *, program: _Program):
    """Up to ``steps`` (int32 []) steps, fewer when every row has ended. Nothing leaves the device."""

    def unfinished(carry):
        state, step = carry
        return (step < steps) & ~jnp.all(state.done)

    def step(carry):
        state, step = carry
        if program.speculative is None:
            state = _plain_step(params, state, sampling, program)
        else:
            state = _speculative_step(params, drafter_params, state, sampling, program)
        return state, step + 1

    return jax.lax.while_loop(unfinished, step, (state, jnp.int32(0)))[0]


def _prepare(params, config, prompt_tokens, prompt_lengths, key, options, speculative, drafter):
    """Check everything, round sizes up to buckets, and run prefill: (state, arguments of ``_advance``, batch)."""
    prompt_tokens, prompt_lengths = _check_prompts(config, prompt_tokens, prompt_lengths, options)
    if not isinstance(options, GenerateOptions):
        raise ValueError(f"options must be GenerateOptions, got {type(options).__name__}")
    drafter, drafter_params = _check_drafter(speculative, drafter)
    batch, prompt = prompt_tokens.shape
    rows = options.for_batch(batch)
    bucket, prompt_bucket = next_power_of_two(batch), max(next_power_of_two(prompt), MIN_PROMPT_BUCKET)

    def pad(x):
        return None if x is None else jnp.pad(x, [(0, bucket - batch)])

    tokens = jnp.pad(prompt_tokens, [(0, bucket - batch), (0, prompt_bucket - prompt)])
    top_k = None if rows.top_k is None else jnp.pad(rows.top_k, [(0, bucket - batch)], constant_values=1)
    top_p = None if rows.top_p is None else jnp.pad(rows.top_p, [(0, bucket - batch)], constant_values=1)
    limit = jnp.int32(options.max_new_tokens)
    sampling = _Sampling(pad(rows.temperature), top_k, top_p, rows.stop_tokens, limit)
    program = _Program(config, options.implementation, next_power_of_two(options.max_new_tokens), speculative, drafter)
    state = _start(params, tokens, pad(prompt_lengths), key, sampling, drafter_params, program=program)
    return state, functools.partial(_run, params, sampling, drafter_params, program), pad(prompt_lengths)


def _run(params, sampling, drafter_params, program, state, steps: int):
    return _advance(params, state, sampling, drafter_params, jnp.int32(steps), program=program)


def _check_prompts(config: ModelConfig, tokens, lengths, options):
    tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or 0 in tokens.shape:
        raise ValueError(
            f"prompt_tokens must be integers [B, P] with B, P >= 1, got {tokens.dtype} {tuple(tokens.shape)}"
        )
    if lengths.shape != tokens.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"prompt_lengths must be integers [B={tokens.shape[0]}], got {lengths.dtype} {tuple(lengths.shape)}"
        )
    if not isinstance(tokens, jax.core.Tracer) and not isinstance(lengths, jax.core.Tracer):
        ids, sizes = np.asarray(tokens), np.asarray(lengths)
        for row, size in enumerate(sizes):
            if not 1 <= size <= ids.shape[1]:
                what = "an empty prompt" if size == 0 else f"{size}"
                raise ValueError(f"prompt_lengths[{row}] must be in [1, P={ids.shape[1]}], got {what}")
            if size + options.max_new_tokens > config.max_length:
                raise ValueError(
                    f"prompt_lengths[{row}] + max_new_tokens must be at most the model's {config.max_length} tokens, "
                    f"got {size} + {options.max_new_tokens}"
                )
            bad = np.flatnonzero((ids[row, :size] < 0) | (ids[row, :size] >= config.vocab_size))
            if bad.size:
                raise ValueError(
                    f"prompt_tokens[{row}, {bad[0]}] must be in [0, vocab_size={config.vocab_size}), "
                    f"got {ids[row, bad[0]]}"
                )
    return tokens.astype(jnp.int32), lengths.astype(jnp.int32)


def _check_drafter(speculative, drafter):
    """(static drafter, its parameters) for the options; ``ValueError`` where they don't fit."""
    if speculative is None:
        if drafter is not None:
            raise ValueError("drafter is given without speculative options; pass speculative=SpeculativeOptions(...)")
        return None, None
    if not isinstance(speculative, SpeculativeOptions):
        raise ValueError(f"speculative must be SpeculativeOptions or None, got {type(speculative).__name__}")
    if speculative.method == "ngram":
        if drafter is not None:
            raise ValueError("drafter must be None for method 'ngram'; a drafter of your own goes with method 'custom'")
        return NgramDrafter.from_options(speculative), None
    if drafter is None:
        raise ValueError(f"drafter must be given for method {speculative.method!r}")
    drafter, params = drafter if isinstance(drafter, tuple) else (drafter, None)
    if drafter.num_draft_tokens != speculative.num_draft_tokens:
        raise ValueError(
            f"drafter.num_draft_tokens must be speculative.num_draft_tokens={speculative.num_draft_tokens}, "
            f"got {drafter.num_draft_tokens}"
        )
    return drafter, params


def generate(
    params: ModelParams,
    config: ModelConfig,
    prompt_tokens,
    prompt_lengths,
    key,
    *,
    options: GenerateOptions,
    speculative: SpeculativeOptions | None = None,
    drafter=None,
) -> GenerateResult:
    """Continue prompts, plainly or speculatively; compiled once per bucket of sizes, nothing read back in between.

    Args:
      params: the parameter pytree; activations take the dtype of ``params.embed``.
      config: the model's ``ModelConfig``.
      prompt_tokens: int [B, P], right-padded. Batch, prompt and output sizes are rounded up to powers of two inside.
      prompt_lengths: int [B], each in 1..P.
      key: one JAX key. A row's tokens depend on the key, its row number and its own prompt and options.
      options: ``GenerateOptions``.
      speculative: ``SpeculativeOptions``, or None to decode token by token. In fp32 greedy tokens are the same.
      drafter: for method "custom", a drafter (``kda_jax.speculate.drafter``) or a pair ``(drafter, its parameters)``.

    Returns:
      ``GenerateResult``.

    Raises:
      ValueError: an argument that does not fit, naming it: an empty prompt, a prompt longer than the model allows, a
        token id out of range, a wrong shape or dtype.
    """
    state, run, prompts = _prepare(params, config, prompt_tokens, prompt_lengths, key, options, speculative, drafter)
    state = run(state, _NO_LIMIT)
    batch = len(prompt_tokens)
    column = jnp.arange(options.max_new_tokens)[None]
    tokens = jnp.take_along_axis(state.tokens, prompts[:, None] + column, axis=1)
    tokens = jnp.where(column < state.emitted[:, None], tokens, 0)
    return jax.tree.map(lambda x: x[:batch], GenerateResult(tokens, state.emitted, state.stats))


def stream(
    params: ModelParams,
    config: ModelConfig,
    prompt_tokens,
    prompt_lengths,
    key,
    *,
    options: GenerateOptions,
    speculative: SpeculativeOptions | None = None,
    drafter=None,
    steps_per_chunk: int = 8,
) -> Iterator[StreamChunk]:
    """``generate`` in slices: the same programs and tokens, read back every ``steps_per_chunk`` steps.

    Yields ``StreamChunk``; the first one holds the token that prefill sampled. Other arguments and errors as
    ``generate``, raised here and not at the first ``next``.
    """
    if steps_per_chunk < 1:
        raise ValueError(f"steps_per_chunk must be at least 1, got {steps_per_chunk}")
    state, run, _ = _prepare(params, config, prompt_tokens, prompt_lengths, key, options, speculative, drafter)
    return _stream(state, run, len(prompt_tokens), steps_per_chunk)


def _stream(state: _State, run, batch: int, steps: int) -> Iterator[StreamChunk]:
    seen = np.zeros(batch, np.int64)
    state = run(state, 0)  # compiles the loop, so that the chunks that follow come at its speed
    while True:
        view = (state.tokens, state.lengths, state.emitted, state.done, state.stats)
        tokens, lengths, emitted, done, stats = jax.tree.map(lambda x: np.asarray(x[:batch]), view)
        new = [tokens[b, lengths[b] - emitted[b] + seen[b] : lengths[b]] for b in range(batch)]
        seen = emitted
        yield StreamChunk(new, done, stats)
        if done.all():
            return
        state = run(state, steps)


def logits(params: ModelParams, config: ModelConfig, tokens, lengths=None, *, implementation: str | None = None):
    """fp32 logits [B, T, vocab] of whole right-padded sequences, differentiable in ``params``.

    Args:
      tokens: int [B, T]; lengths: int [B] or None (all of T). Logits at or past a row's length are zero.

    Raises:
      ValueError: a shape or dtype that does not fit, or a token id out of range, naming the argument.
    """
    tokens = jnp.asarray(tokens)
    if not isinstance(tokens, jax.core.Tracer) and tokens.size:
        ids = np.asarray(tokens)
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"tokens must be in [0, vocab_size={config.vocab_size}), got {bad}")
    lengths = None if lengths is None else jnp.asarray(lengths)
    out = _logits(params, tokens, lengths, config=config, implementation=implementation)
    if lengths is None:
        return out
    return jnp.where((jnp.arange(tokens.shape[1])[None] < lengths[:, None])[..., None], out, 0)


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _logits(params, tokens, lengths, *, config, implementation):
    return model.forward(params, config, tokens, lengths, implementation=implementation)
