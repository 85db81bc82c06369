"""What a sequence keeps between steps, and what a verify leaves for its commit.

Persistent and worth copying with a prefix: ``state`` and ``conv`` (per slot, all KDA layers), ``latents`` (per page,
each MLA layer). A verify's records are workspace of its step; they outlive it only as a pending commit.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kda_jax.cache_layout import CacheLayout, CacheSizes, copy_slots, zeros
from kda_jax.config import ModelConfig
from kda_jax.ops.plan import CommitPlan
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
    layout = CacheLayout.from_sizes(CacheSizes.from_config(config), window=None, dtype=dtype, state_dtype=state_dtype)
    latents = layout.state("latents")
    page = (pages, page_size, *latents.shape)
    return Cache(
        state=zeros(layout.state("state"), slots),
        conv=zeros(layout.state("conv"), slots),
        latents=tuple(jnp.zeros(page, latents.dtype) for _ in range(latents.layers)),
    )


def no_commit(config: ModelConfig, rows: int, window: int, dtype) -> PendingCommit:
    """A pending commit of ``rows`` rows that commits nothing."""
    layout = CacheLayout.from_sizes(CacheSizes.from_config(config), window=window, dtype=dtype)
    correction, key, raw_gate, inputs = (zeros(state, rows) for state in layout.workspace)
    nothing = [jnp.zeros((rows,), jnp.int32) for _ in range(5)]  # one buffer each: they are donated
    plan = CommitPlan(*nothing, writes_boundaries=False)
    return PendingCommit(StepRecords(Records(correction, key, raw_gate), inputs), plan)


def copy_prefix(cache: Cache, source, target) -> Cache:
    """Copy what slots ``source`` hold to ``target`` (int32 [n], 0: no copy): states and convolution histories."""
    state, conv = (copy_slots(pool, source, target) for pool in (cache.state, cache.conv))
    return dataclasses.replace(cache, state=state, conv=conv)
