"""Windows that branch: a draft may hang from any earlier row of its window, and siblings share the checkpoint.

A tree is ``parents`` int32 [R, W]: the row each row of the window continues. Row 0 is the token drafted from, its
parent is -1; every other row's parent is an earlier row. Verify writes no state, so nothing is copied for a branch:
couplings are masked by ancestry and decays are summed along the path (the WY form of the delta rule restricted to a
path). A window without ``parents`` is the tree ``-1, 0, 1, ..`` and runs through the same arithmetic.

Accepted rows of a tree lie on one path. ``gather_path`` moves their records to the front of the window, where
``kda_commit`` and ``conv_commit`` find them as those of a chain.
"""

import jax
import jax.numpy as jnp

from kda_jax.ops._checks import Dims
from kda_jax.ops._couplings import HIGHEST


def tree_implementation(operation: str, implementation: str | None, parents) -> str | None:
    """``implementation``, or ``"xla"`` where ``parents`` are given; ``ValueError`` for a kernel, which trees lack."""
    if parents is None:
        return implementation
    if implementation == "pallas":
        raise ValueError(
            f"implementation='pallas': {operation} with parents (tree drafts) has the XLA form only; use None or 'xla'"
        )
    return "xla" if implementation is None else implementation


def chain_parents(rows: int, window: int):
    """The tree that is a chain, int32 [rows, window]: -1, 0, 1, .."""
    return jnp.broadcast_to(jnp.arange(window, dtype=jnp.int32)[None] - 1, (rows, window))


def paths(parents):
    """Which rows lie on the way from the anchor to each row, itself included.

    Args:
      parents: int [R, W].

    Returns:
      bool [R, W, W]: entry ``[r, i, j]`` says that row ``j`` is on row ``i``'s path. A parent outside ``[0, row)``
      makes the row the first of a path of its own.
    """
    W = parents.shape[1]
    row = jnp.arange(W, dtype=parents.dtype)[None]
    up = jnp.where((parents >= 0) & (parents < row), parents, -1)
    on_path = jnp.broadcast_to(jnp.eye(W, dtype=bool)[None], (*parents.shape, W))
    hops = 1
    while hops < W:  # on_path holds the nearest ``hops`` rows of each path, ``up`` leads to the next one
        above = jnp.take_along_axis(on_path, jnp.maximum(up, 0)[..., None], axis=1)
        on_path = on_path | ((up >= 0)[..., None] & above)
        up = jnp.where(up >= 0, jnp.take_along_axis(up, jnp.maximum(up, 0), axis=1), -1)
        hops *= 2
    return on_path


def window_paths(rows: int, window: int, parents=None):
    """``paths`` of a step's windows. Those of chains are kept from the compiler, so that a chain runs the program of a
    tree and gives its very bits."""
    if parents is not None:
        return paths(parents)
    chain = jnp.broadcast_to(jnp.tri(window, dtype=bool)[None], (rows, window, window))
    return jax.lax.optimization_barrier(chain)


def window_couplings(q, k, log_decay, beta, on_path):
    """Couplings between the tokens of short windows along their paths, all pairs at once.

    The decay from row ``j`` to row ``i`` is ``exp`` of the sum of the log decays of the rows between them on the path,
    ``i`` included: a sum of non-positive numbers, so nothing overflows and nothing cancels.

    Args:
      q, k, log_decay: [R, H, W, K], beta: [R, H, W], fp32. on_path: bool [R, W, W].

    Returns:
      ``attention`` [R, H, W, W]: ``q_i . k_j`` decayed, for ``j`` on ``i``'s path, else 0; ``L`` [R, H, W, W]:
      ``beta_i k_i . k_j`` decayed, for ``j`` before ``i``; and ``exp`` of the sum along each path, [R, H, W, K]. Takes
      W*(W+1)*K exponentials a head.
    """
    W = k.shape[2]
    between = on_path[:, :, None, :] & ~on_path[:, None, :, :]  # [R, i, j, t]: t is on i's path and not on j's
    own_rows = jnp.concatenate([on_path[:, :, None, :], between], axis=2).astype(jnp.float32)
    decay = jnp.exp(jnp.einsum("rijt,rhtk->rhijk", own_rows, log_decay, precision=HIGHEST))
    keys = k[..., None, :, :] * decay[..., 1:, :]
    rows = jnp.stack([q, k], axis=-3)
    products = jnp.sum(rows[..., None, :] * keys[..., None, :, :, :], axis=-1)
    before = on_path & ~jnp.eye(W, dtype=bool)[None]
    attention = jnp.where(on_path[:, None], products[..., 0, :, :], 0)
    return attention, jnp.where(before[:, None], beta[..., None] * products[..., 1, :, :], 0), decay[..., 0, :]


def gather_taps(history, x, parents):
    """The inputs that each row's convolution sees: its own ancestors, then the history.

    Args:
      history: [R, Wc-1, C]. x: [R, W, C]. parents: int [R, W].

    Returns:
      ``Wc`` arrays [R, W, C] in the dtype of ``x``, oldest first; the last is ``x``.
    """
    past, (R, W, _) = history.shape[1], x.shape
    rows = jnp.concatenate([history.astype(x.dtype), x], axis=1)
    row = jnp.arange(W, dtype=jnp.int32)[None]
    up = jnp.where((parents >= 0) & (parents < row), parents, -1)
    # in ``rows``: a row's predecessor is its parent's input, or the newest of the history, before which older ones lie
    before = jnp.concatenate(
        [jnp.broadcast_to(jnp.arange(past, dtype=jnp.int32)[None] - 1, (R, past)), past + up], axis=1
    )
    place = jnp.broadcast_to(past + row, (R, W))
    taps = [x]
    for _ in range(past):
        place = jnp.take_along_axis(before, place, axis=1)
        taps.append(jnp.take_along_axis(rows, place[..., None], axis=1))
    return taps[::-1]


def gather_path(records, path):
    """A step's records with those of a path's rows first, as ``kda_commit`` and ``conv_commit`` read them.

    Args:
      records: ``Records`` ([L, R, ...] or [R, ...]), or the inputs of ``conv_step`` [R, W, C] or [L, R, W, C].
      path: int [R, W]: the rows of the window that stand, in order; row 0, if anything stands, first. Entries past a
        row's accepted count may be any of 0..W-1: a commit does not look at them.

    Returns:
      The same kind, gathered.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument.
    """
    Dims().check("path", path, "R W", kind="int")
    R, W = path.shape

    def gather(name, x, axes):
        layered = getattr(x, "ndim", 0) == len(axes.split()) + 1
        Dims(R=R, W=W).check(name, x, ("L " if layered else "") + axes)
        axis = axes.split().index("W") + layered
        index = path.reshape([{axes.split().index("R") + layered: R, axis: W}.get(i, 1) for i in range(x.ndim)])
        return jnp.take_along_axis(x, index, axis=axis)

    fields = getattr(records, "__dataclass_fields__", None)
    if fields is None:
        return gather("records", records, "R W C")
    return type(records)(**{name: gather(f"records.{name}", getattr(records, name), "R H W C") for name in fields})
