"""From logits to tokens: temperature, top-k and top-p, greedy rows, and the keys rows draw with.

Greedy and sampled rows mix in a batch. What only sampled rows need (thresholds, random bits) sits under one
``lax.cond`` and is skipped at run time when every row is greedy; what ``top_k`` or ``top_p`` need is compiled only
where one is given.
"""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
_TINY = float(jnp.finfo(jnp.float32).tiny)  # the smallest normal number


def row_keys(key: Array, batch: int) -> Array:
    """One key per row, ``[batch]``, derived from one key and the row's number only.

    ``key`` is a typed key (``jax.random.key``) or the raw uint32 data of one (``jax.random.PRNGKey``), shape ``[]``.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim:
        raise ValueError(f"key must be one key, got shape {list(key.shape)}")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch, dtype=jnp.uint32))


def step_keys(keys: Array, positions: Array) -> Array:
    """The keys ``[B]`` of one step: each row's key folded with how many tokens the row has emitted, ``[B]``."""
    return jax.vmap(jax.random.fold_in)(keys, positions.astype(jnp.uint32))


def best_token(logits: Array) -> tuple[Array, Array]:
    """The first index of the largest logit, int32 ``[...]``, and whether the row is bad, bool ``[...]``.

    ``logits`` ``[..., V]``. A row is bad when no distribution can be made of it: it holds NaN or +inf, or is -inf
    throughout. Its token is 0.
    """
    # a maximum and a minimum are vectorised on CPU where an argmax is not, and the maximum carries NaN along
    largest = jnp.max(logits, axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    first = jnp.min(jnp.where(logits == largest, index, logits.shape[-1]), axis=-1)
    bad = ~jnp.isfinite(largest[..., 0])
    return jnp.where(bad, 0, first), bad


def shape_logits(logits: Array, temperature: Array, top_k: Array | None = None, top_p: Array | None = None) -> Array:
    """Log-probabilities, fp32 ``[..., V]``, of the distribution a token is actually sampled from.

    ``temperature`` divides first; ``top_k`` then keeps the k most likely tokens, and ``top_p`` the fewest most likely
    of those whose probability reaches it (at least one). Of equal logits the lower token id counts as more likely, so
    exactly k are kept. What is dropped has log-probability -inf. Temperature 0 gives the first most likely token
    probability one. A bad row (see ``best_token``) gives values that mean nothing.

    Args:
      logits: ``[..., V]``, any floating dtype; computed in fp32. -inf excludes a token.
      temperature: ``[...]``, at least 0.
      top_k: int32 ``[...]``, at least 1, or None.
      top_p: fp32 ``[...]``, in (0, 1], or None.
    """
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)):
        if value is not None and value.shape != logits.shape[:-1]:
            raise ValueError(f"{name} must have shape {list(logits.shape[:-1])}, got {list(value.shape)}")
    logits = logits.astype(jnp.float32)
    # the most likely token sits at 0 whatever the temperature: nothing overflows, and 0 over a tiny number is 0
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = scaled / jnp.maximum(temperature, _TINY)[..., None]
    if top_k is not None or top_p is not None:
        scaled = jnp.where(_kept(scaled, top_k, top_p), scaled, -jnp.inf)
    best, _ = best_token(logits)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    one_hot = jnp.where(index == best[..., None], 0.0, -jnp.inf)
    return jnp.where(temperature[..., None] > 0, jax.nn.log_softmax(scaled, axis=-1), one_hot)


def _kept(scaled: Array, top_k: Array | None, top_p: Array | None) -> Array:
    """Which tokens ``top_k`` and then ``top_p`` keep, bool ``[..., V]``."""
    vocab = scaled.shape[-1]
    keep = jnp.ones(scaled.shape, bool)
    if top_k is not None:
        needed = jnp.clip(top_k.astype(jnp.int32), 1, vocab)
        keep = _most_likely(scaled, keep, keep.astype(jnp.int32), needed)
    if top_p is not None:
        weight = jnp.where(keep, jnp.exp(scaled), 0.0)
        nucleus = _most_likely(scaled, keep, weight, jnp.maximum(top_p * jnp.sum(weight, axis=-1), _TINY))
        # a sum of probabilities may round to 1 early: 1 keeps all
        keep = jnp.where(top_p[..., None] < 1, nucleus, keep)
    return keep


def _most_likely(values: Array, among: Array, weight: Array, needed: Array) -> Array:
    """The fewest largest ``values`` whose weights sum to at least ``needed``, bool ``[..., V]``; of equals the first.

    Only those ``among`` count; all of them when their sum falls short. ``weight`` is equal where ``values`` are.
    Thresholds are found bit by bit: a few dozen sums over the vocabulary instead of a sort.
    """
    # unsigned integers in the order of the floats; the one zero that arithmetic may give a sign is +0 here
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    order = jnp.where(among, order, 0)
    weight = jnp.where(among, weight, 0)

    threshold = _largest_threshold(order, weight, needed, 32)[..., None]
    above, equal = order > threshold, among & (order == threshold)
    # of the equal ones, from the first on, as many as are still needed
    index = lax.broadcasted_iota(jnp.uint32, values.shape, values.ndim - 1)
    falling = jnp.where(equal, values.shape[-1] - index, 0)
    missing = needed - jnp.sum(jnp.where(above, weight, 0), axis=-1)
    bound = _largest_threshold(falling, jnp.where(equal, weight, 0), missing, values.shape[-1].bit_length())
    return above | (equal & (falling >= bound[..., None]))


def _largest_threshold(order: Array, weight: Array, needed: Array, bits: int) -> Array:
    """The largest t, uint32 ``[...]``, with ``sum(weight[order >= t]) >= needed``; 0 when there is none."""

    def refine(i, threshold):
        raised = threshold | (jnp.uint32(1) << (jnp.uint32(bits - 1) - i.astype(jnp.uint32)))
        total = jnp.sum(jnp.where(order >= raised[..., None], weight, 0), axis=-1)
        return jnp.where(total >= needed, raised, threshold)

    return lax.fori_loop(0, bits, refine, jnp.zeros(needed.shape, jnp.uint32))


def draw(log_weights: Array, keys: Array) -> Array:
    """One token per row, int32 ``[B]``, of probability proportional to ``exp(log_weights)``, ``[B, V]``."""
    return jax.vmap(jax.random.categorical)(keys, log_weights).astype(jnp.int32)


def sample(
    logits: Array, keys: Array, temperature: Array, top_k: Array | None = None, top_p: Array | None = None
) -> tuple[Array, Array]:
    """The next token of each row, and which rows could not give one.

    A row of temperature 0 takes its most likely token (the first of equals) and uses no randomness. A row's token
    depends on that row's arguments only.

    Args:
      logits: ``[B, V]``. keys: ``[B]`` typed keys. temperature: fp32 ``[B]``. top_k: int32 ``[B]`` or None.
      top_p: fp32 ``[B]`` or None.

    Returns:
      token: int32 ``[B]``, 0 where ``bad``.
      bad: bool ``[B]``, the row's logits hold NaN or +inf or are -inf throughout: nothing was sampled, and the caller
        ends the row.
    """
    logits = logits.astype(jnp.float32)
    best, bad = best_token(logits)

    def sampled():
        token = draw(shape_logits(logits, temperature, top_k, top_p), keys)
        return jnp.where((temperature > 0) & ~bad, token, best)

    return lax.cond(jnp.any(temperature > 0), sampled, lambda: best), bad
