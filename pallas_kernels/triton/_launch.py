"""What the launches share: block sizes and warps, indices, masked loads and stores."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

FLOAT = jnp.float32
# Three bf16 products for each fp32 one: relative error about 1e-6, where TF32's is 3e-4.
PRECISION = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3


class Block(NamedTuple):
    """Value rows (or channels) of a program, and its warps."""

    rows: int
    warps: int


# By kernel. Chosen by measurement on one NVIDIA H200 at K = V = 128; a program never takes more rows than there are.
BLOCKS = {
    "decode": Block(64, 4),
    "verify": Block(64, 4),
    "commit": Block(64, 4),
    "verify_after_commit": Block(64, 4),
    "conv": Block(512, 4),
}
PREPARED_PER_WARP = 1024  # elements of a [tokens, key channels] tile that one warp of a preparation holds


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def token_tile(window: int) -> int:
    """Rows of a tile that holds a window: two of them are a matrix unit's least 16."""
    return max(8, power_of_two(window))


def key_tile(key_dim: int) -> int:
    return max(16, power_of_two(key_dim))


def block_rows(kernel: str, size: int) -> int:
    return max(16, min(BLOCKS[kernel].rows, power_of_two(size)))


@dataclasses.dataclass(frozen=True)
class Line:
    """Indices (or a mask) along one axis of a tile: down its rows (axis 0) or across its columns (axis 1).

    Held in one dimension. A load along one axis is one-dimensional too: its layout then follows that of the tile it
    meets, where a load of a [1, n] tile would impose its own on everything.
    """

    axis: int
    x: jax.Array

    def map(self, f) -> "Line":
        return Line(self.axis, f(self.x))

    def __lt__(self, limit) -> "Line":
        return Line(self.axis, self.x < limit)

    def __add__(self, offset) -> "Line":
        return Line(self.axis, self.x + offset)

    @property
    def tile(self) -> jax.Array:
        """As [n, 1] or [1, n]."""
        return jnp.expand_dims(self.x, 1 - self.axis)


def along(axis: int, size: int, start=0) -> Line:
    """Indices ``start ..``."""
    return Line(axis, start + jax.lax.broadcasted_iota(jnp.int32, (size,), 0))


def within(index: Line, size: int, tile: int) -> Line | None:
    """``index < size``, or None where tiles of ``tile`` hold exactly ``size``."""
    return None if size % tile == 0 else index < size


def load(ref, at: tuple, *masks):
    """``ref[at]`` as a tile, zero where a mask is false: nothing is accessed there. A mask may be None."""
    axes = {i.axis for i in at if isinstance(i, Line)}
    if len(axes) == 1:
        (axis,) = axes
        x = _load(ref, [_flat(i) for i in at], [_flat(mask) for mask in masks])
        return jnp.expand_dims(x, 1 - axis)
    return _load(ref, [_tile(i) for i in at], [_tile(mask) for mask in masks])


def store(ref, at: tuple, value, *masks):
    """``ref[at] = value`` where the masks are true; ``value`` is a tile."""
    at = [_tile(i) for i in at]
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in at))
    mask = _mask(shape, [_tile(mask) for mask in masks])
    pltriton.store(ref.at[tuple(at)], jnp.broadcast_to(value.astype(ref.dtype), shape), mask=mask)


def _load(ref, at, masks):
    mask = _mask(jnp.broadcast_shapes(*(jnp.shape(i) for i in at)), masks)
    return pltriton.load(ref.at[tuple(at)], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def _flat(x):
    return x.x if isinstance(x, Line) else x


def _tile(x):
    return x.tile if isinstance(x, Line) else x


def _mask(shape, masks):
    masks = [jnp.broadcast_to(mask, shape) for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def call(body, *, name, grid, inputs, outputs, warps, interpret, aliases=None):
    """``pallas_call`` on the Triton route, every operand whole and in place."""
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=outputs,
        input_output_aliases=aliases or {},
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*inputs)


class Refs:
    """A body's references, taken by name in the order in which the launch lists them."""

    def __init__(self, names, refs):
        self.__dict__.update(zip(names, refs, strict=True))


def named(body, inputs: dict, outputs: dict, **options):
    """``call`` with a body that takes ``Refs``: ``inputs`` and ``outputs`` by name, inputs that are None left out.

    An output given as the name of an input is that input, updated in place.
    """
    inputs = {name: x for name, x in inputs.items() if x is not None}
    places = {name: i for i, name in enumerate(inputs)}
    aliases = {places[x]: i for i, x in enumerate(outputs.values()) if isinstance(x, str)}
    shapes = [
        jax.ShapeDtypeStruct(inputs[x].shape, inputs[x].dtype) if isinstance(x, str) else x for x in outputs.values()
    ]
    names = [*inputs, *outputs]
    return call(
        lambda *refs: body(Refs(names, refs)),
        inputs=list(inputs.values()),
        outputs=shapes,
        aliases=aliases,
        **options,
    )
