"""The decoder: embedding, layers, logits; whole sequences here, steps on a cache in ``kda_jax.step``.

``x + mixer(norm(x))``, then ``x + ffn(norm(x))`` in every layer; a final norm; an untied head with fp32 logits. Layers
are unrolled; each kind of layer is traced once (an inner ``jax.jit``), whatever the depth.

``step`` is the one function that runs on a cache. ``prefill``, ``decode``, ``verify`` and ``verify_native`` are steps
of a whole batch that does one thing.
"""

import functools

import jax
import jax.numpy as jnp

from kda_jax.cache import Cache
from kda_jax.config import ModelConfig
from kda_jax.layers import kda, mla
from kda_jax.layers.block import embed, feed_forward, head
from kda_jax.layers.linear import rms_norm
from kda_jax.layers.params import LayerParams, ModelParams
from kda_jax.metadata import DecodeRows, PrefillRows, SpecRows, StepMetadata
from kda_jax.step import commit, defer, fold, keep_path, plan_rows, step

__all__ = [
    "check_tokens",
    "commit",
    "decode",
    "defer",
    "fold",
    "forward",
    "keep_path",
    "plan_rows",
    "prefill",
    "step",
    "verify",
    "verify_native",
]


@functools.partial(jax.jit, static_argnames=("config", "kind", "implementation"))
def _prefill_layer(layer: LayerParams, x, lengths, *, config: ModelConfig, kind: str, implementation):
    y = rms_norm(x, layer.input_norm, config.rms_norm_eps)
    if kind == "kda":
        y, *kept = kda.prefill(layer.mixer, y, lengths, config, implementation=implementation)
    else:
        y, *kept = mla.prefill(layer.mixer, y, config)
    x, index = feed_forward(layer, x + y, config)
    return x, kept, index


def _prefill_layers(params: ModelParams, config: ModelConfig, tokens, lengths, *, implementation, remat=False):
    """Final hidden states [B, T, D]; per layer what it keeps; per MoE layer the experts chosen."""
    x, kept, chosen = embed(params, tokens), [], []
    for layer, kind in zip(params.layers, config.mixer_kinds, strict=True):
        run = functools.partial(_prefill_layer, config=config, kind=kind, implementation=implementation)
        x, keep, index = (jax.checkpoint(run) if remat else run)(layer, x, lengths)
        kept.append((kind, keep))
        if index is not None:
            chosen.append(index)
    return x, kept, chosen


def check_tokens(tokens, lengths) -> None:
    """``tokens`` are integers [B, T] with T >= 1 and ``lengths`` integers [B] or None; else a ``ValueError``."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype} {tuple(tokens.shape)}")
    if tokens.shape[1] == 0:
        raise ValueError("tokens must hold at least one column, got T=0")
    if lengths is not None and (lengths.shape != tokens.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer)):
        raise ValueError(f"lengths must be integers [B={tokens.shape[0]}], got {lengths.dtype} {tuple(lengths.shape)}")


def forward(
    params: ModelParams,
    config: ModelConfig,
    tokens,
    lengths=None,
    *,
    return_load: bool = False,
    remat: bool = False,
    implementation: str | None = None,
):
    """Logits at every position of whole sequences; differentiable in ``params``.

    Args:
      params: the parameter pytree; activations take the dtype of ``params.embed``.
      tokens: int [B, T], right-padded.
      lengths: int [B] or None (all of T). Positions at or past a row's length have meaningless logits.
      return_load: also return how many valid tokens each expert was chosen by, int32 [MoE layers, E].
      remat: recompute each layer in the backward pass instead of keeping its activations.

    Returns:
      fp32 [B, T, vocab], or (logits, load).

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument.
    """
    check_tokens(tokens, lengths)
    x, _, chosen = _prefill_layers(params, config, tokens, lengths, implementation=implementation, remat=remat)
    logits = head(params, x, config)
    if not return_load:
        return logits
    valid = jnp.ones(tokens.shape, bool) if lengths is None else jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    load = [jnp.where(valid[..., None], index, config.num_experts) for index in chosen]
    load = [jnp.bincount(index.reshape(-1), length=config.num_experts).astype(jnp.int32) for index in load]
    return logits, jnp.stack(load) if load else jnp.zeros((0, config.num_experts), jnp.int32)


def _whole_batch(slots):
    return jnp.arange(slots.shape[0], dtype=jnp.int32)


def prefill(params: ModelParams, config: ModelConfig, tokens, lengths, cache: Cache, slots, *, implementation=None):
    """Run fresh prompts and fill their cache.

    Args:
      tokens: int [B, T] right-padded; lengths: int [B], at least 1 for live rows.
      cache: the state and history of row ``b`` go to ``slots[b]`` (int [B], 0: null row), its latents to page ``b``.
        Padding enters none of them.

    Returns:
      Logits fp32 [B, vocab] at each row's last token, and the next cache.
    """
    rows = PrefillRows(_whole_batch(slots), lengths, jnp.zeros_like(lengths), None, slots)
    metadata = StepMetadata(prefill=rows)
    logits, cache, _ = step(params, config, cache, tokens, metadata, implementation=implementation)
    return logits[:, 0], cache


def decode(params: ModelParams, config: ModelConfig, tokens, computed, cache: Cache, slots, *, implementation=None):
    """One token a row.

    Args:
      tokens: int [B]; computed: int [B], tokens already in the cache (the new token's position).
      slots: int [B], each row's slot; 0 for a row that is padding or finished: it changes nothing.

    Returns:
      Logits fp32 [B, vocab] and the next cache.
    """
    metadata = StepMetadata(decode=DecodeRows(_whole_batch(slots), computed, slots))
    logits, cache, _ = step(params, config, cache, tokens[:, None], metadata, implementation=implementation)
    return logits[:, 0], cache


def verify(
    params: ModelParams,
    config: ModelConfig,
    tokens,
    lengths,
    computed,
    cache: Cache,
    slots,
    *,
    implementation=None,
):
    """A window a row, leaving states untouched.

    Args:
      tokens: int [B, W], the last sampled token and its drafts; lengths: int [B], 0..W.
      computed: int [B], tokens already committed. Latents are written at and after that position; those of rejected
        tokens are overwritten by the next step before anything reads them.
      slots: int [B], checkpoints; 0 for a null row.

    Returns:
      Logits fp32 [B, W, vocab], the cache (states and histories unchanged but for a pending commit), and the
      ``StepRecords`` to commit.
    """
    return _verify(params, config, tokens, lengths, computed, cache, slots, None, implementation)


def verify_native(
    params: ModelParams,
    config: ModelConfig,
    tokens,
    lengths,
    computed,
    cache: Cache,
    source_slots,
    target_slots,
    *,
    implementation=None,
):
    """A window a row, writing the state after token ``t`` to ``target_slots[:, t]`` (int [B, W]).

    Other arguments and results as ``verify``; ``StepRecords.records`` is None, and ``commit`` moves the histories only:
    its plan's ``final_slot`` is the slot of the last committed token.
    """
    return _verify(params, config, tokens, lengths, computed, cache, source_slots, target_slots, implementation)


def _verify(params, config, tokens, lengths, computed, cache, slots, target_slots, implementation):
    rows = SpecRows(
        _whole_batch(slots),
        jnp.where(slots > 0, lengths, 0),
        computed,
        slots,
        target_slots=target_slots,
        window=tokens.shape[1],
    )
    return step(params, config, cache, tokens, StepMetadata(spec=rows), implementation=implementation)
