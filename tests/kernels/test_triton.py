"""The Triton route lowers for CUDA without a GPU, in place and without copies of a pool."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import triton
from tests.kernels.lowering import BF16, F32, SWEEP, Sizes, arguments, has_gate, lower

OPS = (
    "decode", "verify", "commit", "verify_after_commit", "conv_step", "conv_commit", "conv_step_after_commit",
)  # fmt: skip
CALL = "custom_call @__gpu$xla.gpu.triton"
LAUNCHES = {"verify": 2, "commit": 2, "verify_after_commit": 2}  # a preparation goes before


@pytest.mark.parametrize("sizes", SWEEP, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_lowers(op, sizes):
    gate = {"lower_bound": None} if has_gate(op) else {}
    text = lower(getattr(triton, op), arguments(op, sizes), "cuda", **gate)
    assert text.count(CALL) == LAUNCHES.get(op, 1)


@pytest.mark.parametrize("op", ["decode", "verify", "commit", "verify_after_commit"])
def test_other_gates_and_plans(op):
    kwargs = arguments(op, Sizes(), rate=False, boundary=False)
    text = lower(getattr(triton, op), kwargs, "cuda", lower_bound=-5.0)
    assert text.count(CALL) == LAUNCHES.get(op, 1)


def test_conv_commit_without_boundaries():
    kwargs = arguments("conv_commit", Sizes(), boundary=False)
    assert lower(triton.conv_commit, kwargs, "cuda").count(CALL) == 1


@pytest.mark.parametrize("op", ["decode", "commit", "verify_after_commit", "conv_commit", "conv_step_after_commit"])
def test_pools_are_updated_in_place(op):
    """Of the call's results exactly one shares its memory with an operand."""
    gate = {"lower_bound": None} if has_gate(op) else {}
    text = lower(getattr(triton, op), arguments(op, Sizes()), "cuda", **gate)
    assert text.count("output_operand_alias<") == 1


def test_what_it_supports():
    good = {"K": 128, "V": 128, "W": 8, "dtype": BF16, "state_dtype": F32}
    assert triton.supports("verify", **good) is None
    for change in ({"K": 257}, {"V": 0}, {"W": 33}, {"dtype": np.float64}, {"state_dtype": np.int32}):
        (name,) = change
        said = {"K": "K", "V": "V", "W": "window", "dtype": "activations", "state_dtype": "pool"}[name]
        assert said in triton.supports("verify", **(good | change))
    taps = {"K": 96, "V": 1, "W": 8, "dtype": BF16, "state_dtype": BF16}
    assert "taps" in triton.supports("conv_step", **taps)


def test_every_kernel_takes_the_same_arguments_on_every_route():
    """What ``arguments`` names is what the functions take, in this order."""
    for op in OPS:
        function = getattr(triton, op)
        code = function.__code__
        names = list(code.co_varnames[: code.co_argcount])
        expected = list(arguments(op, Sizes()))
        assert [name for name in names if name != "lower_bound"] == expected
        assert code.co_varnames[code.co_argcount] == "interpret"


def test_no_kernel_leaves_the_interpreter_out():
    """A GPU is not needed to run any of them: shapes come out as promised."""
    for op in OPS:
        gate = {"lower_bound": None} if has_gate(op) else {}
        kwargs = arguments(op, Sizes(K=16, V=32, W=2))
        out = jax.eval_shape(functools.partial(getattr(triton, op), **gate, interpret=True), **kwargs)
        for pool in [x for x in jax.tree.leaves(out) if x.shape == kwargs["pool"].shape]:
            assert pool.dtype == kwargs["pool"].dtype
