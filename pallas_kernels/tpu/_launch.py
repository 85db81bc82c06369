"""What the launches share: heads of a program, blocks, layouts of operands, the copy of a state to its slot."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

FLOAT = jnp.float32
HIGHEST = jax.lax.Precision.HIGHEST
HEADS = 8  # of a program at most: a state is small beside what a step of the grid costs


def heads_of_program(value_heads: int) -> int:
    return max(n for n in range(1, HEADS + 1) if value_heads % n == 0)


def token_tile(window: int) -> int:
    """Windows are padded to whole vector registers of fp32 rows."""
    return -(-window // 8) * 8


def tile_tokens(x, axis: int):
    """``x`` with its token axis padded to ``token_tile``."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, token_tile(x.shape[axis]) - x.shape[axis])
    return jnp.pad(x, pad)


def per_value_head(x, value_heads: int, axis: int):
    groups = value_heads // x.shape[axis]
    return x if groups == 1 else jnp.repeat(x, groups, axis=axis)


def window_arrays(q, k, v, raw_gate, raw_beta, slots, lengths):
    """fp32 tiles [R, HV, T, .] of a window, beta [R, HV, T, 1]; zero where there is no token, whatever was there."""
    R, W, HV, _ = v.shape
    valid = (jnp.arange(W)[None] < lengths[:, None]) & (slots > 0)[:, None]

    def tile(x):
        x = jnp.where(valid.reshape(R, W, *(1,) * (x.ndim - 2)), x, 0)
        x = per_value_head(x, HV, 2).astype(FLOAT)
        return tile_tokens(jnp.moveaxis(x, 2, 1), 2)

    return [tile(x) for x in (q, k, v, raw_gate, raw_beta[..., None])]


def gate_arrays(A_log, dt_bias):
    """Rates and biases as rows [..., HV, 1, K]."""
    rate = jnp.ones_like(dt_bias) if A_log is None else jnp.broadcast_to(jnp.exp(A_log)[..., None], dt_bias.shape)
    return rate[..., None, :], dt_bias[..., None, :]


def row_block(heads: int, *last: int, lead: int = 1):
    """A program's heads of an array [R, HV, *last] (``lead`` 2: [L, R, HV, *last]), on the grid (.., R, HV / heads)."""
    return pl.BlockSpec((*(None,) * lead, heads, *last), lambda *at: (*at[:lead], at[lead], 0, 0))


def gate_block(heads: int, key_dim: int, lead: int = 0):
    """The same of an array [HV, 1, K] or, with ``lead`` 1, [L, HV, 1, K]."""
    return pl.BlockSpec((*(None,) * lead, heads, 1, key_dim), lambda *at: (*at[:lead], at[lead + 1], 0, 0))


def call(body, *, name, grid, scalars, inputs, specs, outputs, out_specs, scratch=(), aliases=None, interpret):
    """``pallas_call`` with prefetched scalars; ``aliases`` count ``inputs`` and ``outputs``."""
    return pl.pallas_call(
        body,
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=grid, in_specs=specs, out_specs=out_specs, scratch_shapes=scratch
        ),
        input_output_aliases={i + len(scalars): o for i, o in (aliases or {}).items()},
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name=name,
    )(*scalars, *inputs)


def in_hbm():
    return pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)


def write_states(scratch, semaphore, target):
    """Copy what a program holds to its place in the pool, and wait."""
    copy = pltpu.make_async_copy(scratch, target, semaphore)
    copy.start()
    copy.wait()


def fold(state, correction, keys, total):
    """``state * total + correction^T keys``: [V, K], [T, V], [T, K], [1, K]."""
    update = jax.lax.dot_general(
        correction, keys, (((0,), (0,)), ((), ())), precision=HIGHEST, preferred_element_type=FLOAT
    )
    return state * total + update
