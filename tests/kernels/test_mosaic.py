"""Mosaic GPU kernels without a GPU: against an fp64 oracle in interpret mode, and lowered for a Hopper device."""

import dataclasses
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels.mosaic as mosaic

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]
needs_kernels = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the Mosaic GPU kernels need jax 0.11 or newer"
)


def _load_cases():
    path = pathlib.Path(__file__).with_name("mosaic_cases.py")
    spec = importlib.util.spec_from_file_location("mosaic_cases", path)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


cases = _load_cases()
CHECKS = {
    "verify": cases.check_verify,
    "verify_after_commit": cases.check_fold,
    "commit": cases.check_commit,
    "commit_boundaries": functools.partial(cases.check_commit, boundaries=True),
    "decode": cases.check_decode,
}


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("op", CHECKS)
@pytest.mark.parametrize("name", ["plain", "bounded", "strong", "fp32", "groups", "short"])
def test_interpreted_kernels_agree_with_fp64(op, name):
    case = dataclasses.replace(cases.CASES[name], K=128, V=64)
    worst = CHECKS[op](mosaic, case, interpret=True)
    exact = 1e-5
    assert worst.get("state", 0) <= exact
    assert worst.get("u", 0) <= exact
    assert worst.get("o", 0) <= (exact if case.dtype == "float32" else 4e-3)


@needs_kernels
@pytest.mark.parametrize("W", [3, 8])
@pytest.mark.parametrize("op", ["verify", "verify_after_commit", "commit", "commit_boundaries", "decode"])
def test_kernels_lower_for_hopper_without_a_gpu(op, W):
    from jax.sharding import AbstractDevice, AbstractMesh

    def S(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    R, H, HV, K, V, N = 4, 1, 2, 128, 64, 9
    window = (S(R, W, H, K), S(R, W, H, K), S(R, W, HV, V), S(R, W, HV, K), S(R, W, HV))
    gate = (S(HV, dtype=jnp.float32), S(HV, K, dtype=jnp.float32))
    pool, ints = S(N, HV, V, K, dtype=jnp.float32), S(R, dtype=jnp.int32)
    records = (S(R, HV, W, V, dtype=jnp.float32), S(R, H, W, K), S(R, HV, W, K))
    layered = lambda tree: jax.tree.map(lambda x: S(2, *x.shape, dtype=x.dtype), tree)  # noqa: E731
    if op == "verify":
        fn, args = mosaic.verify, (*window, *gate, pool, ints, ints)
    elif op == "verify_after_commit":
        fn, args = mosaic.verify_after_commit, (*window, *gate, pool, *records, *[ints] * 5)
    elif op == "decode":
        token = [S(R, *x.shape[2:], dtype=x.dtype) for x in window]
        fn, args = mosaic.decode, (*token, *gate, pool, ints)
    else:
        ends = [ints, ints] if op == "commit_boundaries" else [None, None]
        fn, args = mosaic.commit, (*layered((pool, *records, *gate)), *[ints] * 3, *ends)
    at = 6 if op in ("commit", "commit_boundaries") else 7

    def call(*args):
        return fn(*args[:at], None, *args[at:])

    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


GOOD = dict(K=128, V=128, W=8, dtype="bfloat16", state_dtype="float32", device_kind="NVIDIA H200")


@needs_kernels
@pytest.mark.parametrize("op", ["verify", "verify_after_commit", "commit", "decode"])
def test_supported_sizes(op):
    assert mosaic.supports(op, **GOOD) is None


@needs_kernels
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (dict(K=64), "K must"), (dict(V=96), "V must"), (dict(W=17), "W must"), (dict(dtype="float16"), "activations"),
        (dict(state_dtype="float16"), "states"), (dict(device_kind="NVIDIA A100-SXM4-80GB"), "Hopper"),
    ],
)  # fmt: skip
def test_other_sizes_are_named(change, word):
    assert word in mosaic.supports("verify", **{**GOOD, **change})


def test_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="op must be"):
        mosaic.supports("prefill", **GOOD)
