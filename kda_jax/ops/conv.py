"""The short causal convolution in front of q, k and v, with SiLU: for prompts, for windows, and its commit.

``y_t = silu(sum_j weight[:, j] * x_{t - (Wc - 1) + j})`` per channel, so the last weight multiplies the current token.
Products, sum and SiLU are fp32, rounded once to the dtype of ``x``.
"""

import jax
import jax.numpy as jnp

from kda_jax.ops._checks import Dims, choose
from kda_jax.ops._kernels import find_kernel
from kda_jax.ops._slots import read_slots
from kda_jax.ops.plan import CommitPlan, check_plan, plan_arguments, write_committed
from kda_jax.ops.tree import gather_taps, tree_implementation


def _silu_quotient(y):
    """``silu`` with the quotient last: XLA then keeps the result instead of recomputing it per element of a state.
    Not for gradients, which overflow below -88."""
    return y / (1 + jnp.exp(-y))


def _convolve(history, x, weight, silu=jax.nn.silu, parents=None):
    """History [B, Wc-1, C] then ``x`` [B, T, C] -> [B, T, C]."""
    T, width = x.shape[1], weight.shape[1]
    if parents is None:
        rows = jnp.concatenate([history.astype(x.dtype), x], axis=1)
        inputs = [jax.lax.slice_in_dim(rows, j, j + T, axis=1) for j in range(width)]
    else:
        inputs = gather_taps(history, x, parents)
    taps = weight.astype(jnp.float32).T[:, None, None, :]
    y = sum(taps[j] * inputs[j].astype(jnp.float32) for j in range(width))
    return silu(y).astype(x.dtype)


def _next_history(history, x, length):
    """Rows ``length .. length + Wc - 2`` of history followed by ``x``: [B, Wc-1, C], [B, T, C], [B]."""
    rows = jnp.concatenate([history, x.astype(history.dtype)], axis=1)
    index = length[:, None] + jnp.arange(history.shape[1])[None]
    return jnp.take_along_axis(rows, index[:, :, None], axis=1)


def _mask(x, lengths):
    return x if lengths is None else jnp.where((jnp.arange(x.shape[1])[None] < lengths[:, None])[..., None], x, 0)


def conv_case(x, width, history_pool):
    """Sizes and dtypes by which a kernel is chosen."""
    sizes = {"K": x.shape[-1], "V": width, "W": x.shape[-2]}
    return sizes | {"dtype": x.dtype, "state_dtype": history_pool.dtype}


def conv_prefill(x, weight, *, history=None, lengths=None, implementation=None):
    """Convolve whole sequences.

    Args:
      x: [B, T, C], any float dtype.
      weight: [C, Wc], any float dtype.
      history: [B, Wc-1, C], the inputs before the first token; None for a fresh sequence (zeros).
      lengths: int [B] or None; tokens at or past the length may hold anything, and give 0.

    Returns:
      ``y`` [B, T, C] and the history after each row's last valid token [B, Wc-1, C], both in the dtype of ``x``.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument.
    """
    choose("conv_prefill", implementation)
    dims = Dims()
    dims.check("x", x, "B T C")
    dims.check("weight", weight, "C Wc")
    B, T, C, width = dims["B"], dims["T"], dims["C"], dims["Wc"]
    if history is None:
        history = jnp.zeros((B, width - 1, C), x.dtype)
    dims.check("history", history, f"B {width - 1} C")
    if lengths is not None:
        dims.check("lengths", lengths, "B", kind="int")
    x = _mask(x, lengths)
    ends = jnp.full((B,), T, jnp.int32) if lengths is None else jnp.clip(lengths, 0, T)
    return _mask(_convolve(history, x, weight), lengths), _next_history(history.astype(x.dtype), x, ends)


def conv_step(x, weight, history_pool, slots, lengths, *, parents=None, implementation=None):
    """Convolve a window of tokens on top of each request's history, which is only read.

    Args:
      x: [R, W, C], which is also the record that ``conv_commit`` takes.
      weight: [C, Wc].
      history_pool: [N, Wc-1, C].
      slots: int [R]; 0 is the null slot: output zero, nothing read.
      lengths: int [R], 0..W.
      parents: int [R, W], the row of the window that each row continues (``ops.tree``), or None: the row before it. A
        row's taps lie on its own path: its ancestors, then the history.

    Returns:
      ``y`` [R, W, C] in the dtype of ``x``, zero at and past the length.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument; ``parents`` for a kernel.
    """
    implementation = tree_implementation("conv_step", implementation, parents)
    choose("conv_step", implementation)
    dims = Dims()
    dims.check("x", x, "R W C")
    dims.check("weight", weight, "C Wc")
    dims.check("history_pool", history_pool, f"N {dims['Wc'] - 1} C")
    dims.check("slots", slots, "R", kind="int")
    dims.check("lengths", lengths, "R", kind="int")
    if parents is not None:
        dims.check("parents", parents, "R W", kind="int")
    kernel = find_kernel("conv_step", implementation, **conv_case(x, weight.shape[1], history_pool))
    if kernel is not None:
        return kernel(x, weight, history_pool, slots, lengths)
    lengths = jnp.where(slots > 0, lengths, 0)
    history = read_slots(history_pool[None], slots)[0]
    return _mask(_convolve(history, _mask(x, lengths), weight, _silu_quotient, parents), lengths)


def conv_commit(history_pool, x, plan: CommitPlan, *, implementation=None):
    """Move each request's history past its accepted tokens, at the final and at the boundary position.

    Args:
      history_pool: [N, Wc-1, C] or [L, N, Wc-1, C]; donate it to update it in place.
      x: [R, W, C] or [L, R, W, C], the inputs ``conv_step`` was given.
      plan: ``CommitPlan``; rows with ``commit_length`` 0 write nothing.

    Returns:
      The next pool.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument.
    """
    choose("conv_commit", implementation)
    layered = getattr(history_pool, "ndim", 0) == 4
    lead = "L " if layered else ""
    dims = Dims()
    dims.check("history_pool", history_pool, lead + "N H C")
    dims.check("x", x, lead + "R W C")
    check_plan(dims, plan)
    if not layered:
        history_pool, x = history_pool[None], x[None]
    kernel = find_kernel("conv_commit", implementation, **conv_case(x, history_pool.shape[2] + 1, history_pool))
    if kernel is not None:
        next_pool = kernel(history_pool, x, *plan_arguments(plan))
        return next_pool if layered else next_pool[0]

    def advance(source, length):
        return jax.vmap(_next_history, in_axes=(0, 0, None))(source, x, jnp.clip(length, 0, dims["W"]))

    next_pool = write_committed(history_pool, plan, advance)
    return next_pool if layered else next_pool[0]
