"""What the Mosaic GPU kernels share: tiles of 64 value rows, one warpgroup a tile, products exact to two bf16 terms."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LAYOUT = plgpu.Layout
FLOAT = jnp.float32
ROWS = 64  # value rows of a tile
CHUNK = 64  # key channels held in registers at once


def smem(shape, dtype, swizzle=128):
    """Shared memory that TMA, wgmma and registers all meet without bank conflicts."""
    columns = swizzle // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def window_swizzle(columns: int) -> int:
    """Swizzle of a bf16 operand whose contraction or row is ``columns`` long."""
    return min(128, 2 * columns)


def split(x):
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(FLOAT)).astype(jnp.bfloat16)


def load_transposed(ref, tokens: int, W: int):
    """A window [W, 64] in device memory as registers [64, W]."""
    return plgpu.layout_cast(
        plgpu.load(ref.transpose((1, 0)), layout=LAYOUT.WGMMA_TRANSPOSED, optimized=False), LAYOUT.WGMMA
    )


def store_transposed(ref, x):
    """Registers [64, W] to a window [W, 64] in device memory."""
    store(ref.transpose((1, 0)), plgpu.layout_cast(x, LAYOUT.WGMMA_TRANSPOSED))


def store(ref, x):
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def accumulate(acc, terms, interpret):
    """``acc + sum a @ b``: ``terms`` are (a: bf16 values [64, n], b: bf16 ref, whether b is stored transposed)."""
    if interpret:
        for a, ref, transposed in terms:
            b = ref[...].astype(FLOAT)
            acc = acc + jnp.dot(a.astype(FLOAT), b.T if transposed else b, precision="highest")
        return acc

    def run(acc_ref):
        for a, ref, transposed in terms:
            plgpu.wgmma(acc_ref, a, ref.transpose((1, 0)) if transposed else ref)

    return pl.run_state(run)(plgpu.ACC.init(acc))


def twice(x):
    return jax.lax.concatenate([x, x], 1)


def columns_below(shape, length):
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1) < length


def interpret_params(interpret):
    return plgpu.InterpretGPUParams() if interpret else None


def zeros(shape, dtype=FLOAT):
    return plgpu.layout_cast(jnp.zeros(shape, dtype), LAYOUT.WGMMA)
