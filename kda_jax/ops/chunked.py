"""The chunkwise form: whole chunks at a time, for prompts and training."""

import jax
import jax.numpy as jnp
from einops import rearrange

from kda_jax.ops._checks import choose
from kda_jax.ops._couplings import HIGHEST, block_couplings, next_power_of_two
from kda_jax.ops.recurrent import check_sequence_inputs, mask_sequence, repeat_heads

CHUNK_SIZES = (16, 32, 64)


def kda_chunked(
    q,
    k,
    v,
    log_decay,
    beta,
    *,
    initial_state=None,
    scale=None,
    lengths=None,
    chunk_size=64,
    bounded=False,
    implementation=None,
):
    """Kimi Delta Attention chunk by chunk: the same function as ``kda_recurrent``, up to rounding.

    Within a chunk the corrected writes are ``Vn = M (beta v) - M (beta k exp(G)) S`` with ``M = (I + L)^-1`` (the
    WY form of the delta rule, Kimi Linear); chunks follow each other through the state. Differentiable in every array.

    Args:
      q, k, v, log_decay, beta, initial_state, scale, lengths: as in ``kda_recurrent``.
      chunk_size: 16, 32 or 64 tokens.
      bounded: a promise that ``log_decay >= -5``, which a kernel may use. The XLA form needs no promise.

    Returns:
      ``o`` [B, T, HV, V] in the dtype of ``v``, and the state after the last valid token [B, HV, V, K] fp32.

    Raises:
      ValueError: a shape, dtype or chunk size that does not fit, naming the argument.
    """
    choose("kda_chunked", implementation)
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size must be one of {CHUNK_SIZES}, got {chunk_size!r}")
    dims = check_sequence_inputs(q, k, v, log_decay, beta, initial_state, lengths)
    B, T, HV, V, K = (dims[name] for name in ("B", "T", "HV", "V", "K"))
    scale = K**-0.5 if scale is None else scale
    state = jnp.zeros((B, HV, V, K), jnp.float32) if initial_state is None else initial_state.astype(jnp.float32)
    dtype = v.dtype
    if T == 0:
        return jnp.zeros((B, 0, HV, V), dtype), state

    chunk = min(chunk_size, next_power_of_two(T))
    chunks = -(-T // chunk)
    padding = chunks * chunk - T

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return rearrange(x, "b (n c) h ... -> n b h c ...", c=chunk)

    q, k, v, log_decay, beta = (split(x) for x in mask_sequence(q, k, v, log_decay, beta, lengths))
    q, k = repeat_heads(q * scale, HV, 2), repeat_heads(k, HV, 2)
    block = block_couplings(q, k, log_decay, beta)
    decay_in = jnp.exp(block.prefix)
    writes = jnp.matmul(block.inverse, beta[..., None] * v, precision=HIGHEST)
    reads = jnp.matmul(block.inverse, beta[..., None] * k * decay_in, precision=HIGHEST)

    def step(state, x):
        query, key, decay, writes, reads, attention = x
        corrections = writes - jnp.einsum("bhck,bhvk->bhcv", reads, state, precision=HIGHEST)
        output = jnp.einsum("bhck,bhvk->bhcv", query, state, precision=HIGHEST)
        output = output + jnp.matmul(attention, corrections, precision=HIGHEST)
        update = jnp.einsum("bhcv,bhck->bhvk", corrections, key, precision=HIGHEST)
        return state * decay[..., None, :] + update, output

    per_chunk = (q * decay_in, k * jnp.exp(block.suffix), jnp.exp(block.total), writes, reads, block.attention)
    state, outputs = jax.lax.scan(step, state, per_chunk)
    return rearrange(outputs, "n b h c v -> b (n c) h v")[:, :T].astype(dtype), state
