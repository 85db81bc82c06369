"""What a sequence keeps between steps.

Persistent and worth copying with a prefix: ``state`` and ``conv`` (per slot, all KDA layers), ``latents`` (per row and
token, each MLA layer). A step's records are workspace: they belong to the step, not to the cache.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kda_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Slot 0 of ``state`` and ``conv`` is the null slot. ``latents`` are indexed by batch row, not by slot."""

    state: jax.Array  # [L_kda, N, HV, V, K] fp32
    conv: jax.Array  # [L_kda, N, Wc-1, C] activation dtype
    latents: tuple[jax.Array, ...]  # per MLA layer [B, S, r + rope] activation dtype


def make_cache(config: ModelConfig, *, batch: int, tokens: int, dtype, states_per_row: int = 1) -> Cache:
    """An empty cache for ``batch`` rows of up to ``tokens`` tokens.

    ``states_per_row`` is 1, or the window size where verify keeps a state per position. Row ``b`` owns state slots
    ``1 + b * states_per_row`` and following, and convolution slot ``1 + b``.
    """
    layers = config.num_kda_layers
    state = (config.kda_num_value_heads, config.kda_value_dim, config.kda_key_dim)
    return Cache(
        state=jnp.zeros((layers, 1 + batch * states_per_row, *state), jnp.float32),
        conv=jnp.zeros((layers, 1 + batch, config.conv_width - 1, config.conv_channels), dtype),
        latents=tuple(jnp.zeros((batch, tokens, config.latent_dim), dtype) for _ in range(config.num_mla_layers)),
    )
