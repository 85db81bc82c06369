"""What a sequence keeps between steps, and what a verify leaves for its commit.

Persistent and worth copying with a prefix: ``state`` and ``conv`` (per slot, all KDA layers), ``latents`` (per page,
each MLA layer). A verify's records are workspace of its step; they outlive it only as a pending commit.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kda_jax.config import ModelConfig
from kda_jax.ops.plan import CommitPlan, write_committed
from kda_jax.ops.verify import Records


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRecords:
    """The workspace a verify leaves for its commit, stacked over the KDA layers."""

    records: Records | None  # [L, R, ...]; None where states were written natively
    conv_inputs: jax.Array  # [L, R, W, C]
    # int32 [R, W]: where the state after each token is, if it is not yet where it belongs (native, mode "align")
    position_slots: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendingCommit:
    """A commit that is decided and not yet written: its own step's records and plan, whatever the next step is."""

    records: StepRecords
    plan: CommitPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Slot 0 of ``state`` and ``conv`` is the null slot; so is page 0 of ``latents`` where pages are used."""

    state: jax.Array  # [L_kda, N, HV, V, K] fp32 or bf16
    conv: jax.Array  # [L_kda, N, Wc-1, C] activation dtype
    latents: tuple[jax.Array, ...]  # per MLA layer [pages, tokens, r + rope] activation dtype
    pending: PendingCommit | None = None


def make_cache(
    config: ModelConfig, *, batch: int, tokens: int, dtype, states_per_row: int = 1, window: int | None = None
) -> Cache:
    """An empty cache for ``batch`` rows of up to ``tokens`` tokens, one latent page a row.

    ``states_per_row`` is 1, or the window size where verify keeps a state per position: row ``b`` owns slots
    ``1 + b * states_per_row`` and following. ``window`` makes room for a pending commit of that many tokens, empty now.
    """
    cache = make_pools(config, slots=1 + batch * states_per_row, pages=batch, page_size=tokens, dtype=dtype)
    return cache if window is None else dataclasses.replace(cache, pending=no_commit(config, batch, window, dtype))


def make_pools(config: ModelConfig, *, slots: int, pages: int, page_size: int, dtype, state_dtype=jnp.float32) -> Cache:
    """A cache of ``slots`` state slots and ``pages`` latent pages of ``page_size`` tokens, null ones included."""
    layers = config.num_kda_layers
    state = (config.kda_num_value_heads, config.kda_value_dim, config.kda_key_dim)
    return Cache(
        state=jnp.zeros((layers, slots, *state), state_dtype),
        conv=jnp.zeros((layers, slots, config.conv_width - 1, config.conv_channels), dtype),
        latents=tuple(jnp.zeros((pages, page_size, config.latent_dim), dtype) for _ in range(config.num_mla_layers)),
    )


def no_commit(config: ModelConfig, rows: int, window: int, dtype) -> PendingCommit:
    """A pending commit of ``rows`` rows that commits nothing."""
    L, H, HV, K = config.num_kda_layers, config.kda_num_heads, config.kda_num_value_heads, config.kda_key_dim
    records = Records(
        correction=jnp.zeros((L, rows, HV, window, config.kda_value_dim), jnp.float32),
        key=jnp.zeros((L, rows, H, window, K), dtype),
        raw_gate=jnp.zeros((L, rows, HV, window, K), dtype),
    )
    inputs = jnp.zeros((L, rows, window, config.conv_channels), dtype)
    nothing = [jnp.zeros((rows,), jnp.int32) for _ in range(5)]  # one buffer each: they are donated
    return PendingCommit(StepRecords(records, inputs), CommitPlan(*nothing, writes_boundaries=False))


def copy_slots(cache: Cache, source, target) -> Cache:
    """Copy what slots ``source`` hold to ``target`` (int32 [n], 0: no copy): states and convolution histories."""
    target = jnp.where(source > 0, target, 0)
    plan = CommitPlan(jnp.ones_like(source), source, target, source * 0, source * 0, writes_boundaries=False)
    state, conv = (write_committed(pool, plan, lambda rows, _: rows) for pool in (cache.state, cache.conv))
    return dataclasses.replace(cache, state=state, conv=conv)
