"""The decoder: embedding, layers, logits, in its prefill, decode and verify forms.

``x + mixer(norm(x))``, then ``x + ffn(norm(x))`` in every layer; a final norm; an untied head with fp32 logits. Layers
are unrolled; each kind of layer is traced once (an inner ``jax.jit``), whatever the depth.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kda_jax import ops
from kda_jax.cache import Cache
from kda_jax.config import ModelConfig
from kda_jax.layers import kda, mla
from kda_jax.layers.linear import linear, rms_norm
from kda_jax.layers.moe import mlp, moe
from kda_jax.layers.params import LayerParams, MLPParams, ModelParams
from kda_jax.ops._slots import layered_slots
from kda_jax.ops.plan import write_committed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRecords:
    """The workspace a verify leaves for its commit, stacked over the KDA layers."""

    records: ops.Records | None  # [L, R, ...]; None where states were written natively
    conv_inputs: jax.Array  # [L, R, W, C]


def _embed(params: ModelParams, tokens):
    return params.embed[tokens]


def _head(params: ModelParams, x, config: ModelConfig):
    return linear(rms_norm(x, params.norm, config.rms_norm_eps), params.lm_head, output_dtype=jnp.float32)


def _ffn(layer: LayerParams, x, config: ModelConfig):
    """Adds the feed-forward block; also the experts chosen, int32 [B, T, k], or None for a dense layer."""
    y = rms_norm(x, layer.post_norm, config.rms_norm_eps)
    if isinstance(layer.ffn, MLPParams):
        return x + mlp(layer.ffn, y), None
    y, index = moe(layer.ffn, y, config)
    return x + y, index


@functools.partial(jax.jit, static_argnames=("config", "kind", "implementation"))
def _prefill_layer(layer: LayerParams, x, lengths, *, config: ModelConfig, kind: str, implementation):
    y = rms_norm(x, layer.input_norm, config.rms_norm_eps)
    if kind == "kda":
        y, *kept = kda.prefill(layer.mixer, y, lengths, config, implementation=implementation)
    else:
        y, *kept = mla.prefill(layer.mixer, y, config)
    x, index = _ffn(layer, x + y, config)
    return x, kept, index


def _prefill_layers(params: ModelParams, config: ModelConfig, tokens, lengths, *, implementation, remat=False):
    """Final hidden states [B, T, D]; per layer what it keeps; per MoE layer the experts chosen."""
    x, kept, chosen = _embed(params, tokens), [], []
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
    logits = _head(params, x, config)
    if not return_load:
        return logits
    valid = jnp.ones(tokens.shape, bool) if lengths is None else jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    load = [jnp.where(valid[..., None], index, config.num_experts) for index in chosen]
    load = [jnp.bincount(index.reshape(-1), length=config.num_experts).astype(jnp.int32) for index in load]
    return logits, jnp.stack(load) if load else jnp.zeros((0, config.num_experts), jnp.int32)


def prefill(
    params: ModelParams,
    config: ModelConfig,
    tokens,
    lengths,
    cache: Cache,
    slots,
    conv_slots=None,
    *,
    implementation=None,
):
    """Run fresh prompts and fill their cache.

    Args:
      tokens: int [B, T] right-padded; lengths: int [B], at least 1 for live rows.
      cache: the state of row ``b`` goes to ``slots[b]`` (int [B], 0: null row), its convolution history to
        ``conv_slots[b]`` (default ``slots``), its latents to row ``b``. Padding enters none of them.

    Returns:
      Logits fp32 [B, vocab] at each row's last token, and the next cache.
    """
    x, kept, _ = _prefill_layers(params, config, tokens, lengths, implementation=implementation)
    last = jnp.maximum(lengths - 1, 0)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)
    conv_slots = slots if conv_slots is None else conv_slots
    states = [keep for kind, keep in kept if kind == "kda"]
    latents = [keep[0] for kind, keep in kept if kind == "mla"]
    state, conv = cache.state, cache.conv
    if states:
        state = _write(cache.state, slots, jnp.stack([s for s, _ in states]))
        conv = _write(cache.conv, conv_slots, jnp.stack([h for _, h in states]))
    start = jnp.zeros_like(lengths)
    rows = tuple(mla.write_latents(old, new, start) for old, new in zip(cache.latents, latents, strict=True))
    return _head(params, x, config)[:, 0], Cache(state, conv, rows)


def _write(pool, slots, rows):
    """``rows`` [L, R, ...] into slots [R] of every layer of ``pool`` [L, N, ...]."""
    n = jnp.ones_like(slots)
    plan = ops.CommitPlan(n, slots, slots, n * 0, n * 0, writes_boundaries=False)
    return write_committed(pool, plan, lambda source, length: rows)


@functools.partial(jax.jit, static_argnames=("config", "mode", "implementation"))
def _step_layer(layer: LayerParams, x, memory, rows, *, config: ModelConfig, mode: str, implementation):
    """One layer of a step: (x, next memory, workspace). ``rows`` are the keyword arguments of the layer's form."""
    y = rms_norm(x, layer.input_norm, config.rms_norm_eps)
    if mode == "mla":
        y, memory = mla.decode(layer.mixer, y, memory, config=config, **rows)
        return _ffn(layer, x + y, config)[0], memory, None
    state, conv = memory
    form = {"decode": kda.decode, "verify": kda.verify, "native": kda.verify_native}[mode]
    y, result, inputs = form(layer.mixer, y, state, conv, config=config, implementation=implementation, **rows)
    x, _ = _ffn(layer, x + y, config)
    if mode == "verify":
        return x, memory, (result, inputs)
    return x, (result, conv), (None, inputs)


def _step(
    params: ModelParams, config: ModelConfig, tokens, lengths, computed, cache: Cache, slots, mode, implementation
):
    """All layers on windows ``tokens`` [B, W]. ``slots``: the slot arguments of the KDA form."""
    x = _embed(params, tokens)
    L, N = cache.state.shape[:2]
    memory = (cache.state.reshape(L * N, *cache.state.shape[2:]), cache.conv.reshape(-1, *cache.conv.shape[2:]))
    pools = {"slots": N, "source_slots": N, "target_slots": N, "history_slots": cache.conv.shape[1]}
    per_layer = {name: layered_slots(slot, L, pools[name]) for name, slot in slots.items()}
    extra = {} if mode == "decode" else {"lengths": lengths}
    latents, work = iter(cache.latents), []
    next_latents = []
    for layer, kind in zip(params.layers, config.mixer_kinds, strict=True):
        run = functools.partial(_step_layer, layer, x, config=config, implementation=implementation)
        if kind == "mla":
            x, latent, _ = run(next(latents), {"computed": computed}, mode="mla")
            next_latents.append(latent)
        else:
            rows = {name: slot[len(work)] for name, slot in per_layer.items()}
            x, memory, left = run(memory, rows | extra, mode=mode)
            work.append(left)
    records = jax.tree.map(lambda *leaves: jnp.stack(leaves), *work) if work else (None, cache.conv[:, :0])
    state = memory[0].reshape(cache.state.shape)
    return _head(params, x, config), Cache(state, cache.conv, tuple(next_latents)), StepRecords(*records)


def decode(params: ModelParams, config: ModelConfig, tokens, computed, cache: Cache, slots, *, implementation=None):
    """One token a row.

    Args:
      tokens: int [B]; computed: int [B], tokens already in the cache (the new token's position).
      slots: int [B], each row's slot; 0 for a row that is padding or finished: it changes nothing.

    Returns:
      Logits fp32 [B, vocab] and the next cache.
    """
    lengths = (slots > 0).astype(jnp.int32)
    logits, cache, left = _step(
        params, config, tokens[:, None], lengths, computed, cache, {"slots": slots}, "decode", implementation
    )
    return logits[:, 0], _commit_conv(cache, left, ops.plan_commit(lengths, lengths, slots), implementation)


def verify(
    params: ModelParams, config: ModelConfig, tokens, lengths, computed, cache: Cache, slots, *, implementation=None
):
    """A window a row, leaving states untouched.

    Args:
      tokens: int [B, W], the last sampled token and its drafts; lengths: int [B], 0..W.
      computed: int [B], tokens already committed. Latents are written at and after that position; those of rejected
        tokens are overwritten by the next step before anything reads them.
      slots: int [B], checkpoints; 0 for a null row.

    Returns:
      Logits fp32 [B, W, vocab], the cache (states and histories unchanged), and the ``StepRecords`` to commit.
    """
    lengths = jnp.where(slots > 0, lengths, 0)
    return _step(params, config, tokens, lengths, computed, cache, {"slots": slots}, "verify", implementation)


def verify_native(
    params: ModelParams,
    config: ModelConfig,
    tokens,
    lengths,
    computed,
    cache: Cache,
    source_slots,
    target_slots,
    conv_slots,
    *,
    implementation=None,
):
    """A window a row, writing the state after token ``t`` to ``target_slots[:, t]`` (int [B, W]).

    Other arguments and results as ``verify``; ``StepRecords.records`` is None, and ``commit`` moves the histories only.
    """
    lengths = jnp.where(source_slots > 0, lengths, 0)
    slots = {"source_slots": source_slots, "target_slots": target_slots, "history_slots": conv_slots}
    return _step(params, config, tokens, lengths, computed, cache, slots, "native", implementation)


def commit(params: ModelParams, config: ModelConfig, cache: Cache, left: StepRecords, plan, *, implementation=None):
    """The next cache: a step's accepted tokens folded into states and histories by ``plan`` (``ops.CommitPlan``)."""
    if left.records is not None:
        mixers = [layer.mixer for layer, kind in zip(params.layers, config.mixer_kinds, strict=True) if kind == "kda"]
        gates = [kda.gate_params(mixer, config) for mixer in mixers]
        gate = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gates)
        state = ops.kda_commit(cache.state, left.records, gate, plan, implementation=implementation)
        cache = dataclasses.replace(cache, state=state)
    return _commit_conv(cache, left, plan, implementation)


def _commit_conv(cache: Cache, left: StepRecords, plan, implementation) -> Cache:
    conv = ops.conv_commit(cache.conv, left.conv_inputs, plan, implementation=implementation)
    return dataclasses.replace(cache, conv=conv)
