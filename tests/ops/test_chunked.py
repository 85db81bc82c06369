"""kda_chunked: values and refusals. Its gradients are in test_chunked_gradients.py."""

import numpy as np
import pytest

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_zero_past, jitted
from tests.ops.inputs import BF16, BOUNDED_DECAYS, DECAYS, F32, MORE_DIMS, nan_past, rng, sequence
from tests.ops.test_recurrent import BAD, good_sequence
from tests.tolerances import assert_close, tolerance

OPS = ("kda_chunked",)


def check_rows(out, ref, dtype, names=DECAYS):
    (o, state), (o_ref, state_ref) = out, ref
    assert o.dtype == dtype
    assert state.dtype == F32
    for b, name in enumerate(names):
        assert_close(o[b], o_ref[b], tolerance(dtype).output, f"o, {name}")
        assert_close(state[b], state_ref[b], tolerance(dtype).chunk_state, f"state, {name}")


@pytest.mark.parametrize("T", [1, 2, 15, 17, 63, 64, 65, 130])
def test_values(implementation, T):
    x = sequence(T, T)
    check_rows(jitted("kda_chunked", implementation=implementation)(**x), oracle.recurrent(**x), F32)


@pytest.mark.parametrize(("T", "chunk_size"), [(15, 16), (130, 16), (17, 32), (65, 32)])
def test_chunk_sizes(implementation, T, chunk_size):
    x = sequence(T + chunk_size, T)
    out = jitted("kda_chunked", chunk_size=chunk_size, implementation=implementation)(**x)
    check_rows(out, oracle.recurrent(**x), F32)


@pytest.mark.parametrize(("T", "chunk_size"), [(1, 64), (40, 16), (70, 64)])
def test_bounded(implementation, T, chunk_size):
    """-5 at every step is the largest exponent that the bounded form may meet."""
    decays = BOUNDED_DECAYS | {"bound": lambda r, shape: np.full(shape, -5.0)}
    x = sequence(T, T, decays=decays)
    out = jitted("kda_chunked", chunk_size=chunk_size, bounded=True, implementation=implementation)(**x)
    check_rows(out, oracle.recurrent(**x), F32, decays)


@pytest.mark.parametrize("bounded", [False, True])
def test_bf16(implementation, bounded):
    decays = BOUNDED_DECAYS if bounded else DECAYS
    x = sequence(2, 65, dtype=BF16, decays=decays)
    out = jitted("kda_chunked", bounded=bounded, implementation=implementation)(**x)
    check_rows(out, oracle.recurrent(**x), BF16, decays)


@pytest.mark.parametrize("dims", MORE_DIMS, ids=str)
def test_heads_and_dims(implementation, dims):
    x = sequence(1, 20, dims)
    check_rows(jitted("kda_chunked", chunk_size=16, implementation=implementation)(**x), oracle.recurrent(**x), F32)


def test_scale_and_no_initial_state(implementation):
    x = sequence(4, 20)
    del x["initial_state"]
    for scale in (None, 0.7):
        out = jitted("kda_chunked", chunk_size=16, scale=scale, implementation=implementation)(**x)
        check_rows(out, oracle.recurrent(**x, scale=scale), F32)


@pytest.mark.parametrize("step", [1, 2], ids=["the same key", "two keys in turn"])
@pytest.mark.parametrize("sign", [1, -1], ids=["same sign", "alternating sign"])
def test_repeated_keys(implementation, step, sign):
    """Equal keys at full strength make I + L as far from the identity as it gets; powers of L then cancel badly."""
    x = sequence(5, 64, decays={"weak": DECAYS["weak"]})
    x["k"] = x["k"][:, np.arange(64) % step] * (np.float32(sign) ** (np.arange(64, dtype=F32) // step))[:, None, None]
    x["beta"][:] = 1
    check_rows(jitted("kda_chunked", implementation=implementation)(**x), oracle.recurrent(**x), F32, ["weak"])


@pytest.mark.parametrize("bounded", [False, True])
def test_lengths_with_nan_in_the_padding(implementation, bounded):
    decays = BOUNDED_DECAYS | {"again": BOUNDED_DECAYS["any"]} if bounded else DECAYS
    lengths = np.array([0, 1, 16, 31, 33, 70], np.int32)
    x = sequence(6, 70, decays=decays)
    x = {name: a if name == "initial_state" else nan_past(a, lengths) for name, a in x.items()}
    run = jitted("kda_chunked", chunk_size=32, bounded=bounded, implementation=implementation)
    o, state = run(**x, lengths=lengths)
    check_rows((o, state), oracle.recurrent(**x, lengths=lengths), F32, decays)
    assert_zero_past(o, lengths, "o")
    np.testing.assert_array_equal(state[0], x["initial_state"][0])


def test_rows_do_not_mix(implementation):
    """A row's result is the same, bit for bit, whatever the other rows hold."""
    x = sequence(7, 40)
    run = jitted("kda_chunked", chunk_size=16, implementation=implementation)
    o, state = run(**x)
    other = {name: a.copy() for name, a in x.items()}
    for a in other.values():
        a[1:] = rng(1).normal(size=a[1:].shape) ** 2 * (-1 if a is other["log_decay"] else 0.1)
    o_other, state_other = run(**other)
    np.testing.assert_array_equal(o[0], o_other[0])
    np.testing.assert_array_equal(state[0], state_other[0])


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    match, change = BAD[case]
    with pytest.raises(ValueError, match=match):
        ops.kda_chunked(**(good_sequence() | change))


@pytest.mark.parametrize("chunk_size", [0, -16, 8, 63, 16.0])
def test_bad_chunk_size(chunk_size):
    with pytest.raises(ValueError, match=rf"\bchunk_size\b.*{chunk_size}"):
        ops.kda_chunked(**good_sequence(), chunk_size=chunk_size)
