"""Adaptive verification inside ``generate``: each step's budget, chosen on the device from what is known before it."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import model
from kda_jax.cache import Cache
from kda_jax.config import ModelConfig
from kda_jax.layers.params import ModelParams
from kda_jax.metadata import SpecRows, StepMetadata
from kda_jax.speculate.adaptive import allocate, best_budget, expected, faded, monotone, sizes

REPEATS = 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Expectation:
    """What is known of each row's drafts."""

    said: jax.Array  # fp32 [B, m]: the drafter's confidence in its last drafts, -1 where it gave none
    judged: jax.Array  # fp32 [B]
    stood: jax.Array  # fp32 [B]


def nothing_known(batch: int, num_draft: int) -> Expectation:
    return Expectation(jnp.full((batch, num_draft), -1.0), jnp.zeros((batch,)), jnp.zeros((batch,)))


def plan(expectation: Expectation, said, num_draft, room, live, costs) -> tuple[jax.Array, jax.Array]:
    """How many drafts each row verifies, int32 [B], and which of ``sizes`` the step has, int32 [].

    ``said`` fp32 [B, m] or None: confidences of this step's drafts, of which each row has ``num_draft`` [B]; they say
    who is verified. How many are, follows from the expectation and from ``room`` [B], the drafts a row could take,
    alone; ``costs`` fp32 [n]: milliseconds of each size.
    """
    batch, m = expectation.said.shape
    own = expected(expectation.judged, expectation.stood, expectation.judged.sum(), expectation.stood.sum())
    before = jnp.where(expectation.said < 0, own[:, None], expectation.said)
    could = (jnp.arange(m)[None] < room[:, None]) & live[:, None]
    survival = jnp.where(could, jnp.cumprod(before, axis=1), 0.0)
    budget, size = best_budget(survival.reshape(-1), jnp.sum(live), sizes(batch, m + 1), costs, xp=jnp)
    return allocate(before if said is None else said, jnp.where(live, num_draft, 0), budget), size


def learn(expectation: Expectation, said, judged, stood) -> Expectation:
    """After a step that judged ``judged`` [B] drafts, of which the first ``stood`` [B] stood."""
    said = jnp.full_like(expectation.said, -1.0) if said is None else jnp.nan_to_num(said)
    return Expectation(said, *faded(expectation.judged, expectation.stood, judged, stood))


def packed_sizes(batch: int, window: int) -> list[int | None]:
    """``SpecRows.packed`` of each of ``sizes``."""
    return [None if size == batch * window else size for size in sizes(batch, window)]


def switch(step, size, rows: SpecRows):
    """``step(rows)``, packed as ``size`` says: a program with a branch for each."""

    def branch(packed):
        return lambda: step(dataclasses.replace(rows, packed=packed))

    found = [branch(packed) for packed in packed_sizes(rows.lengths.shape[0], rows.window)]
    return jax.lax.switch(size, found)


_MEASURED: dict = {}


def measured_costs(
    params: ModelParams, config: ModelConfig, cache: Cache, slots, tokens: int, window: int, implementation: str | None
) -> np.ndarray:
    """Milliseconds of verifying windows of each of ``sizes``, fp32 [n]: measured on rows of ``tokens`` cached tokens
    with their states in ``slots`` [B], once for each shape of the problem. The cache is only read."""
    key = config, implementation, window, jax.tree.map(lambda x: (x.shape, str(x.dtype)), cache.latents)
    key = (*key[:3], str(key[3]), cache.state.shape, str(cache.state.dtype))
    if key not in _MEASURED:
        batch, found = len(slots), []
        for size, packed in zip(sizes(batch, window), packed_sizes(batch, window), strict=True):
            rows = SpecRows(
                request_rows=jnp.arange(batch, dtype=jnp.int32),
                lengths=jnp.full((batch,), size // batch, jnp.int32),
                computed=jnp.full((batch,), tokens, jnp.int32),
                slots=slots,
                window=window,
                packed=packed,
            )
            drafts = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (batch, window)), jnp.int32)
            cost = functools.partial(_verify, params, cache, drafts, rows, config=config, implementation=implementation)
            times = []
            for _ in range(1 + REPEATS):
                began = time.perf_counter()
                jax.block_until_ready(cost())
                times.append(1e3 * (time.perf_counter() - began))
            found.append((size, float(np.median(times[1:]))))
        _MEASURED[key] = np.asarray([ms for _, ms in monotone(found)], np.float32)
    return _MEASURED[key]


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _verify(params, cache, tokens, rows: SpecRows, *, config, implementation):
    logits, _, left = model.step(params, config, cache, tokens, StepMetadata(spec=rows), implementation=implementation)
    return logits, left
