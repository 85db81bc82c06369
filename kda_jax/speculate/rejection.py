"""Which drafts stand, and the token that follows them.

Drafts ``d_1..d_m`` of a row are judged by the target's distributions ``p_0..p_m`` (``p_i`` after i drafts, row i of
the window) and the drafter's ``q_1..q_m``. Every method but ``"synthetic"`` leaves the output distributed as plain
sampling:

- greedy rows (temperature 0): ``d_i`` stands while it is the most likely token of ``p_{i-1}``;
- ``"standard"`` (Leviathan et al. 2023, Chen et al. 2023): ``d_i`` stands with probability ``min(p_{i-1} / q_i, 1)``;
  after the first that does not, a token of ``normalise(max(p_{i-1} - q_i, 0))``;
- ``"block"`` (Sun et al. 2024): the drafts are judged together, which accepts at least as many on average;
- ``"synthetic"``: drafts stand at given rates whatever the target says, for benchmarks.

Each method is a list of thresholds to compare independent uniforms with (`thresholds`), a rule that turns the
comparisons into a length (`accepted_length`), and the distribution of the token that follows (`next_weights`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kda_jax.config import check_choice
from kda_jax.options import REJECTIONS
from kda_jax.speculate.sampling import best_token, sample, shape_logits

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The outcome of judging one window of each row."""

    num_accepted_drafts: Array  # int32 [B], 0..num_draft
    tokens: Array  # int32 [B, m + 1]: the accepted drafts, the token that follows them, then zeros
    nan: Array  # bool [B]: no token follows, because the logits there hold NaN; the row ends
    path: Array | None = None  # of a tree, int32 [B, m + 1]: the window's rows that stand, row 0 first; None: 0, 1, ..

    @property
    def num_emitted(self) -> Array:
        """int32 ``[B]``: the accepted drafts and the token that follows them, which a row with ``nan`` lacks."""
        return self.num_accepted_drafts + jnp.where(self.nan, 0, 1)


def accept(
    logits: Array,
    drafts: Array,
    num_draft: Array,
    draft_probs: Array | None,
    keys: Array,
    temperature: Array,
    top_k: Array | None = None,
    top_p: Array | None = None,
    method: str = "standard",
    synthetic_rates: tuple[float, ...] | None = None,
) -> Acceptance:
    """Judge the drafts of every row and choose the token that follows those that stand.

    Greedy and sampled rows mix; a row's outcome depends on that row's arguments only. What only sampled rows need is
    skipped at run time when every row is greedy.

    A row's drafts end before the first one outside ``[0, V)`` (-1 is padding): from there on none stands. They also end
    where the logits that would follow are bad (NaN, +inf, or -inf throughout): a bad row of the window is never sampled
    from, and is reported only when every draft before it stands, which is when plain decoding would have met it.
    Window rows past a row's drafts are not looked at.

    Args:
      logits: ``[B, m + 1, V]``; row i follows i drafts.
      drafts: int32 ``[B, m]``.
      num_draft: int32 ``[B]``, each row's own number of drafts, 0..m.
      draft_probs: ``[B, m, V]``, what each draft was really sampled from, or None for a deterministic drafter. A draft
        to which it gives probability zero is rejected; in sampled rows drafts end before one whose probabilities are
        not finite.
      keys: typed keys ``[B]``.
      temperature: fp32 ``[B]``. top_k: int32 ``[B]`` or None. top_p: fp32 ``[B]`` or None. They shape the target here;
        the drafter has applied them to ``draft_probs``.
      method: ``"standard"``, ``"block"`` or ``"synthetic"``.
      synthetic_rates: for ``"synthetic"``, the probability that drafts 1..i all stand, for each i; greedy rows too.

    Raises:
      ValueError: naming the argument.
    """
    check_window(logits, drafts, num_draft, draft_probs, keys, temperature, top_k, top_p)
    _check_method(method, synthetic_rates, drafts)
    batch, window, vocab = logits.shape
    m = window - 1
    logits = logits.astype(jnp.float32)
    best, bad = best_token(logits)
    index = lax.broadcasted_iota(jnp.int32, (batch, m), 1)
    real = (index < num_draft[:, None]) & (drafts >= 0) & (drafts < vocab)
    # at most as many drafts as there are good rows before the first bad one
    count = _leading(real & ~bad[:, :m]) if m else jnp.zeros(batch, jnp.int32)

    if method == "synthetic":
        accepted, last = _synthetic(logits, count, keys, temperature, top_k, top_p, synthetic_rates)
    else:
        matches = _leading((drafts == best[:, :m]) & (index < count[:, None]))
        greedy = matches, at_column(best, matches)

        def judged():
            # a drafter whose probabilities are not numbers has drawn nothing
            drawn = None if draft_probs is None else jnp.all(jnp.isfinite(draft_probs), axis=-1)
            sure = count if drawn is None else jnp.minimum(count, _leading(drawn))
            accepted, last = _judge(logits, drafts, sure, draft_probs, keys, temperature, top_k, top_p, method)
            sampled = temperature > 0
            return jnp.where(sampled, accepted, greedy[0]), jnp.where(sampled, last, greedy[1])

        accepted, last = lax.cond(jnp.any(temperature > 0), judged, lambda: greedy)

    nan = at_column(bad, accepted)
    column = lax.broadcasted_iota(jnp.int32, (batch, window), 1)
    padded = jnp.pad(drafts.astype(jnp.int32), ((0, 0), (0, 1)))
    last = jnp.where(nan, 0, last)[:, None]
    tokens = jnp.where(column < accepted[:, None], padded, jnp.where(column == accepted[:, None], last, 0))
    return Acceptance(accepted, tokens, nan)


def thresholds(
    log_probs: Array, drafts: Array, count: Array, draft_probs: Array | None, method: str
) -> tuple[Array, Array]:
    """What each draft's uniform must stay below, and how far the target is scaled down after each draft.

    Args:
      log_probs: the target's, shaped, fp32 ``[B, m + 1, V]``. drafts: int32 ``[B, m]``. count: int32 ``[B]``, nothing
        passes beyond. draft_probs: ``[B, m, V]`` or None. method: ``"standard"`` or ``"block"``.

    Returns:
      ``h`` fp32 ``[B, m]``, of which entry i - 1 belongs to ``d_i``: ``p_{i-1}(d_i) / q_i(d_i)`` for ``"standard"``.
      ``P`` fp32 ``[B, m + 1]``, of which entry i scales ``p_i``: ones for ``"standard"``. For ``"block"``, ``P_0 = 1``,
      ``P_i = min(P_{i-1} p_{i-1}(d_i) / q_i(d_i), 1)``, ``h_i = Z_i / (Z_i + 1 - P_i)`` with
      ``Z_i = sum max(P_i p_i - q_{i+1}, 0)``, and ``h_i = P_i`` for the last draft.
    """
    batch, m = drafts.shape
    chosen = jnp.clip(drafts, 0, log_probs.shape[-1] - 1)[..., None]
    number = lax.broadcasted_iota(jnp.int32, (batch, m), 1) + 1
    target = jnp.exp(jnp.take_along_axis(log_probs[:, :m], chosen, axis=-1)[..., 0])
    if draft_probs is None:
        proposal = jnp.ones_like(target)
    else:
        proposal = jnp.take_along_axis(draft_probs, chosen, axis=-1)[..., 0].astype(jnp.float32)
    usable = (number <= count[:, None]) & (proposal > 0)
    target, proposal = jnp.where(usable, target, 0.0), jnp.where(usable, proposal, 1.0)
    if method == "standard":
        return target / proposal, jnp.ones((batch, m + 1), jnp.float32)

    scales = [jnp.ones(batch, jnp.float32)]
    for i in range(m):
        scales.append(jnp.minimum(scales[-1] * target[:, i] / proposal[:, i], 1.0))
    scale = jnp.stack(scales, axis=1)
    after = scale[:, 1:m]
    if draft_probs is None:
        # all of q_{i+1} is on d_{i+1}, where it exceeds the target
        left = after * (1 - target[:, 1:])
    else:
        probs = jnp.exp(log_probs[:, 1:m])
        left = jnp.sum(jnp.maximum(after[..., None] * probs - draft_probs[:, 1:], 0.0), axis=-1)
    total = left + 1 - after
    h = jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), 0.0)
    h = jnp.pad(h, ((0, 0), (0, min(m, 1))))
    h = jnp.where(number < count[:, None], h, jnp.where(number == count[:, None], scale[:, 1:], 0.0))
    return h, scale


def accepted_length(passed: Array, method: str) -> Array:
    """How many drafts stand, int32 ``[B]``, given which uniforms lie below their thresholds, bool ``[B, m]``.

    ``"block"``: up to the last that passed. Otherwise: those before the first that did not.
    """
    if method == "block":
        number = lax.broadcasted_iota(jnp.int32, passed.shape, 1) + 1
        return jnp.max(jnp.where(passed, number, 0), axis=1, initial=0)
    return _leading(passed)


def next_weights(
    log_probs: Array, drafts: Array, count: Array, draft_probs: Array | None, scale: Array, accepted: Array
) -> Array:
    """Unnormalised log-probabilities fp32 ``[B, V]`` of the token that follows ``accepted`` drafts.

    ``log max(P_i p_i - q_{i+1}, 0)`` after i accepted drafts, and ``log p_i`` when those were all. Arguments as for,
    and from, ``thresholds``.
    """
    target = at_column(log_probs, accepted)
    m = drafts.shape[1]
    if m == 0:
        return target
    refused = jnp.minimum(accepted, m - 1)
    if draft_probs is None:
        index = lax.broadcasted_iota(jnp.int32, target.shape, 1)
        residual = jnp.where(index == at_column(drafts, refused)[:, None], -jnp.inf, target)
    else:
        scaled = at_column(scale, accepted)[:, None] * jnp.exp(target)
        residual = jnp.log(jnp.maximum(scaled - at_column(draft_probs, refused).astype(jnp.float32), 0.0))
    # nothing left of a target that equals the drafter's up to rounding: such a rejection is rounding too
    residual = jnp.where(jnp.max(residual, axis=1, keepdims=True) > -jnp.inf, residual, target)
    return jnp.where((accepted < count)[:, None], residual, target)


def _judge(logits, drafts, count, draft_probs, keys, temperature, top_k, top_p, method):
    """Accepted drafts and the token after them, of sampled rows. What it says of greedy rows means nothing."""
    batch, window, vocab = logits.shape

    def rows(x: Array | None) -> Array | None:
        return None if x is None else jnp.broadcast_to(x[:, None], (batch, window))

    log_probs = shape_logits(logits, rows(temperature), rows(top_k), rows(top_p))
    uniforms, gumbel = noise(keys, window - 1, vocab)
    h, scale = thresholds(log_probs, drafts, count, draft_probs, method)
    accepted = accepted_length(uniforms < h, method)
    weights = next_weights(log_probs, drafts, count, draft_probs, scale, accepted)
    return accepted, best_token(weights + gumbel)[0]


def _synthetic(logits, count, keys, temperature, top_k, top_p, rates):
    conditional = [b / a if a > 0 else 0.0 for a, b in zip((1.0, *rates), rates, strict=False)]
    index = lax.broadcasted_iota(jnp.int32, (logits.shape[0], len(rates)), 1)
    uniforms, _ = noise(keys, len(rates), 0)
    accepted = _leading((uniforms < jnp.asarray(conditional, jnp.float32)[None]) & (index < count[:, None]))
    token_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
    token, _ = sample(at_column(logits, accepted), token_keys, temperature, top_k, top_p)
    return accepted, token


def noise(keys: Array, m: int, vocab: int) -> tuple[Array, Array]:
    """Independent uniforms ``[B, m]`` and Gumbel noise ``[B, vocab]``, from one draw a row."""
    smallest = float(jnp.finfo(jnp.float32).tiny)
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (m + vocab,), minval=smallest))(keys)
    return uniforms[:, :m], -jnp.log(-jnp.log(uniforms[:, m:]))


def _leading(flags: Array) -> Array:
    """How many flags hold before the first that does not, int32 ``[B]``, of ``[B, m]``."""
    return jnp.sum(jnp.cumprod(flags, axis=1, dtype=jnp.int32), axis=1)


def at_column(x: Array, column: Array) -> Array:
    """Each row's entry of its own column, ``x[b, column[b]]``: ``[B, ...]`` of ``[B, n, ...]``."""
    index = column.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, index, axis=1)[:, 0]


def check_window(logits, drafts, num_draft, draft_probs, keys, temperature, top_k, top_p):
    """The arguments that every way of judging takes fit each other; else a ``ValueError`` naming one."""
    if logits.ndim != 3 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floating [B, m + 1, V], got {logits.dtype} {list(logits.shape)}")
    batch, window, vocab = logits.shape
    for name, value, shape in (
        ("drafts", drafts, (batch, window - 1)),
        ("num_draft", num_draft, (batch,)),
        ("draft_probs", draft_probs, (batch, window - 1, vocab)),
        ("keys", keys, (batch,)),
        ("temperature", temperature, (batch,)),
        ("top_k", top_k, (batch,)),
        ("top_p", top_p, (batch,)),
    ):
        if value is None and name in ("draft_probs", "top_k", "top_p"):
            continue
        if value.shape != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)} for logits {list(logits.shape)}, got {list(value.shape)}"
            )
    for name, value in (("drafts", drafts), ("num_draft", num_draft)):
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, got {value.dtype}")


def _check_method(method, synthetic_rates, drafts):
    check_choice("method", method, REJECTIONS)
    if (method == "synthetic") != (synthetic_rates is not None):
        raise ValueError(f"synthetic_rates goes with method 'synthetic', got {synthetic_rates!r} with {method!r}")
    if synthetic_rates is not None and len(synthetic_rates) != drafts.shape[1]:
        raise ValueError(f"synthetic_rates must have {drafts.shape[1]} entries, got {len(synthetic_rates)}")
