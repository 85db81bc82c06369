"""The jit-compiled ``generate``: prefill, then one loop on the device until every row has ended.

Two programs per bucket of batch, prompt and output sizes (``generation_loop``). ``generate`` runs the loop to the end,
``stream`` in slices.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import model
from kda_jax.checks import check_integer
from kda_jax.config import ModelConfig
from kda_jax.generation_adaptive import measured_costs
from kda_jax.generation_loop import GenerateStats, LoopState, Program, Sampling, advance, ratio, start
from kda_jax.layers.params import ModelParams
from kda_jax.ops._couplings import next_power_of_two
from kda_jax.options import GenerateOptions, SpeculativeOptions
from kda_jax.speculate.resolve import resolve_drafter

MIN_PROMPT_BUCKET = 16
_NO_LIMIT = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateResult:
    tokens: jax.Array  # int32 [B, max_new_tokens], 0 after a row's end
    lengths: jax.Array  # int32 [B]: emitted tokens, a stop token included
    stats: GenerateStats

    @property
    def acceptance_length(self) -> jax.Array:
        """Tokens a step, fp32 [B]: ``(emitted - 1) / steps``, prefill's token belonging to none; NaN without one."""
        return ratio(self.lengths - 1, self.stats.steps)

    @property
    def overall_acceptance_length(self) -> jax.Array:
        """Tokens a step over all rows, fp32 []."""
        return ratio(jnp.sum(jnp.maximum(self.lengths - 1, 0)), jnp.sum(self.stats.steps))


class StreamChunk(NamedTuple):
    """What ``stream`` yields: ``tokens``, per row the new token ids (numpy int32); ``finished`` bool [B]; ``stats`` so
    far (numpy leaves)."""

    tokens: list[np.ndarray]
    finished: np.ndarray
    stats: GenerateStats


def _prepare(params, config, prompt_tokens, prompt_lengths, key, options, speculative, drafter):
    """Check everything, round sizes up to buckets, and run prefill.

    Returns the loop's state, a function of (state, steps) that advances it, and the prompt lengths of the padded batch.
    """
    if not isinstance(options, GenerateOptions):
        raise ValueError(f"options must be GenerateOptions, got {type(options).__name__}")
    prompt_tokens, prompt_lengths = _check_prompts(config, prompt_tokens, prompt_lengths, options)
    if not isinstance(key, jax.Array | np.ndarray):
        raise ValueError(f"key must be a JAX key such as jax.random.key(0), got {key!r}")
    drafter, drafter_params = resolve_drafter(config, speculative, drafter, options.implementation)
    batch, prompt = prompt_tokens.shape
    rows = options.for_batch(batch)
    bucket, prompt_bucket = next_power_of_two(batch), max(next_power_of_two(prompt), MIN_PROMPT_BUCKET)

    def pad(x):
        return None if x is None else jnp.pad(x, [(0, bucket - batch)])

    tokens = jnp.pad(prompt_tokens, [(0, bucket - batch), (0, prompt_bucket - prompt)])
    top_k = None if rows.top_k is None else jnp.pad(rows.top_k, [(0, bucket - batch)], constant_values=1)
    top_p = None if rows.top_p is None else jnp.pad(rows.top_p, [(0, bucket - batch)], constant_values=1)
    limit = jnp.int32(options.max_new_tokens)
    sampling = Sampling(pad(rows.temperature), top_k, top_p, rows.stop_tokens, limit)
    program = Program(config, options.implementation, next_power_of_two(options.max_new_tokens), speculative, drafter)
    state = start(params, tokens, pad(prompt_lengths), key, sampling, drafter_params, program=program)
    costs = None
    if speculative is not None and speculative.adaptive:
        costs = _costs(params, program, state, prompt_bucket)
    return state, functools.partial(_run, params, sampling, drafter_params, program, costs=costs), pad(prompt_lengths)


def _run(params, sampling, drafter_params, program, state, steps: int, *, costs):
    return advance(params, state, sampling, drafter_params, jnp.int32(steps), costs, program=program)


def _costs(params, program: Program, state: LoopState, tokens: int):
    if isinstance(state.tokens, jax.core.Tracer):
        raise ValueError("adaptive must be False where generate is traced: it measures times before it starts")
    slots = 1 + jnp.arange(state.done.shape[0], dtype=jnp.int32) * program.states_per_row
    cache = dataclasses.replace(state.cache, pending=None)
    window = program.speculative.window
    return measured_costs(params, program.config, cache, slots, tokens, window, program.implementation)


def _host(array):
    """``array`` as numpy, in the dtype it came in; a traced one as it is."""
    return array if isinstance(array, jax.core.Tracer) else np.asarray(array)


def _check_prompts(config: ModelConfig, tokens, lengths, options: GenerateOptions):
    tokens, lengths = _host(tokens), _host(lengths)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or 0 in tokens.shape:
        raise ValueError(
            f"prompt_tokens must be integers [B, P] with B, P >= 1, got {tokens.dtype} {tuple(tokens.shape)}"
        )
    if lengths.shape != tokens.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"prompt_lengths must be integers [B={tokens.shape[0]}], got {lengths.dtype} {tuple(lengths.shape)}"
        )
    if isinstance(lengths, np.ndarray):
        for row, size in enumerate(lengths):
            if not 1 <= size <= tokens.shape[1]:
                what = "an empty prompt" if size == 0 else f"{size}"
                raise ValueError(f"prompt_lengths[{row}] must be in [1, P={tokens.shape[1]}], got {what}")
            if size + options.max_new_tokens > config.max_length:
                raise ValueError(
                    f"prompt_lengths[{row}] + max_new_tokens must be at most the model's {config.max_length} tokens, "
                    f"got {size} + {options.max_new_tokens}"
                )
        _check_ids("prompt_tokens", tokens, lengths, config)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)


def _check_ids(name: str, tokens, lengths, config: ModelConfig) -> None:
    """Token ids before each row's length lie in the vocabulary; traced arrays are not looked at."""
    if isinstance(tokens, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    bad = (tokens < 0) | (tokens >= config.vocab_size)
    if lengths is not None:
        bad &= np.arange(tokens.shape[1])[None] < lengths[:, None]
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            f"{name}[{row}, {column}] must be in [0, vocab_size={config.vocab_size}), got {tokens[row, column]}"
        )


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
      drafter: for method "draft", a ``DraftModel`` (``kda_jax.load_drafter``) with the model's vocabulary; for method
        "custom", a drafter (``kda_jax.speculate.drafter``) or a pair ``(drafter, its parameters)``.

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
    check_integer("steps_per_chunk", steps_per_chunk, 1)
    state, run, _ = _prepare(params, config, prompt_tokens, prompt_lengths, key, options, speculative, drafter)
    return _stream(state, run, len(prompt_tokens), steps_per_chunk)


def _stream(state: LoopState, run, batch: int, steps: int) -> Iterator[StreamChunk]:
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
    tokens, lengths = _host(tokens), None if lengths is None else _host(lengths)
    model.check_tokens(tokens, lengths)
    if isinstance(lengths, np.ndarray) and ((lengths < 0) | (lengths > tokens.shape[1])).any():
        raise ValueError(f"lengths must be in [0, T={tokens.shape[1]}], got {lengths}")
    _check_ids("tokens", tokens, lengths, config)
    tokens = jnp.asarray(tokens, jnp.int32)
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    out = _logits(params, tokens, lengths, config=config, implementation=implementation)
    if lengths is None:
        return out
    return jnp.where((jnp.arange(tokens.shape[1])[None] < lengths[:, None])[..., None], out, 0)


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _logits(params, tokens, lengths, *, config, implementation):
    return model.forward(params, config, tokens, lengths, implementation=implementation)
