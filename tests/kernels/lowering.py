"""Lowering kernels for a device that is not here, and the arguments of every kernel as shapes."""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
JAX = tuple(int(part) for part in jax.__version__.split(".")[:2])


class Sizes(NamedTuple):
    """R rows, window W, H query/key heads, HV value heads, key and value dims, N slots, L layers, C channels."""

    K: int = 128
    V: int = 64
    W: int = 8
    dtype: type = BF16
    state: type = F32
    H: int = 2
    HV: int = 4
    R: int = 3
    N: int = 9
    L: int = 2
    C: int = 96

    def __str__(self):
        return (
            f"{self.K}-{self.V}-{self.W}-{jnp.dtype(self.dtype).name}-{jnp.dtype(self.state).name}-{self.HV // self.H}"
        )


# W, K, V and both dtypes each vary, K != V both ways, groups of heads
SWEEP = (
    Sizes(),
    Sizes(K=64, V=128, W=1),
    Sizes(K=96, V=80, W=3, dtype=F32, state=BF16, HV=2),
    Sizes(K=16, V=48, W=4, state=BF16),
    Sizes(K=256, V=256, W=16, HV=2),
    Sizes(K=48, V=16, W=5, dtype=F32),
    Sizes(K=128, V=128, W=2, HV=6),
    Sizes(K=240, V=112, W=9),
)


def arguments(op: str, s: Sizes, rate: bool = True, boundary: bool = True) -> dict:
    """Arguments of a route's function ``op`` by name, as shapes, without ``lower_bound``."""

    def of(*shape, dtype=s.dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = of(s.R, dtype=I32)
    window = {
        "q": of(s.R, s.W, s.H, s.K),
        "k": of(s.R, s.W, s.H, s.K),
        "v": of(s.R, s.W, s.HV, s.V),
        "raw_gate": of(s.R, s.W, s.HV, s.K),
        "raw_beta": of(s.R, s.W, s.HV),
    }
    gate = {"A_log": of(s.HV, dtype=F32) if rate else None, "dt_bias": of(s.HV, s.K, dtype=F32)}
    pool = of(s.N, s.HV, s.V, s.K, dtype=s.state)
    records = {
        "correction": of(s.R, s.HV, s.W, s.V, dtype=F32),
        "key": of(s.R, s.H, s.W, s.K),
        "raw_gate": of(s.R, s.HV, s.W, s.K),
    }
    plan = {"commit_length": rows, "source_slot": rows, "final_slot": rows}
    bounded = plan | ({"boundary_slot": rows, "boundary_length": rows} if boundary else {})
    here = {"slots": rows, "lengths": rows}
    x, history = of(s.R, s.W, s.C), of(s.N, 3, s.C)

    def layers(arrays):
        return {
            name: None if a is None else jax.ShapeDtypeStruct((s.L, *a.shape), a.dtype) for name, a in arrays.items()
        }

    if op == "decode":
        one = {name: jax.ShapeDtypeStruct((a.shape[0], *a.shape[2:]), a.dtype) for name, a in window.items()}
        return one | gate | {"pool": pool, "slots": rows}
    if op == "verify":
        return window | gate | {"pool": pool} | here
    if op == "verify_after_commit":
        old = {"correction": records["correction"], "key": records["key"], "raw_gate_record": records["raw_gate"]}
        return window | gate | {"pool": pool} | old | plan | here
    if op == "commit":
        return layers({"pool": pool} | records | gate) | bounded
    if op == "conv_step":
        return {"x": x, "weight": of(s.C, 4), "pool": history} | here
    if op == "conv_step_after_commit":
        return {"x": x, "weight": of(s.C, 4), "pool": history, "x_pending": x} | plan | here
    assert op == "conv_commit"
    return layers({"pool": history, "x": x}) | bounded


def has_gate(op: str) -> bool:
    return not op.startswith("conv")


def lower(function, kwargs: dict, platform: str, **static) -> str:
    """The text of ``function(**kwargs, **static)`` lowered for ``platform``; arguments that are None stay None."""
    arrays = {name: a for name, a in kwargs.items() if a is not None}
    absent = {name: None for name, a in kwargs.items() if a is None}
    with _device(platform):
        traced = jax.jit(lambda arrays: function(**arrays, **absent, **static)).trace(arrays)
        return traced.lower(lowering_platforms=(platform,)).as_text()


def _device(platform: str):
    """From jax 0.11 on, a kernel for a GPU is traced for the device of the mesh."""
    if platform != "cuda" or JAX < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=1)
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))
