"""The choice of a route: by backend, capability, version, sizes; never the interpreter unless asked for."""

import types

import jax
import numpy as np
import pytest

from kda_jax import ops
from pallas_kernels import routes

CASE = {"K": 128, "V": 128, "W": 8, "dtype": np.float32, "state_dtype": np.float32}


def device(platform="gpu", capability="9.0", kind="NVIDIA H200", version="cuda 13"):
    client = types.SimpleNamespace(platform_version=version)
    return types.SimpleNamespace(platform=platform, compute_capability=capability, device_kind=kind, client=client)


@pytest.fixture
def on(monkeypatch):
    """Pretend to run on a device, with these routes installed and supporting everything."""

    def pretend(device, jax_version=(0, 11), installed=routes.ROUTES, refuses=()):
        def module(name):
            if name not in installed:
                return None
            reason = "too large" if name in refuses else None
            return types.SimpleNamespace(supports=lambda op, **case: reason, verify=lambda *a, **kw: (name, kw))

        monkeypatch.setattr(routes, "default_device", lambda: device)
        monkeypatch.setattr(routes, "_jax_version", lambda: jax_version)
        monkeypatch.setattr(routes, "_module", module)

    return pretend


def found(asked=False, **case):
    route = routes.compiled("verify", asked=asked, **(CASE | case))
    return None if route is None else route.name


def test_hopper_takes_mosaic(on):
    on(device())
    assert found() == "mosaic"
    assert routes.compiled("verify", **CASE).kernel("verify")() == ("mosaic", {"interpret": False})


def test_what_the_first_route_lacks_goes_to_the_next(on):
    on(device(), refuses=("mosaic",))
    assert found() == "triton"
    on(device(), installed=("triton",))
    assert found() == "triton"
    on(device(), refuses=("mosaic", "triton"))
    assert found() is None


def test_older_jax_and_older_gpus_take_triton(on):
    on(device(), jax_version=(0, 10))
    assert found() == "triton"
    on(device(capability="8.0"))
    assert found() == "triton"
    on(device(capability="7.5"))
    assert found() is None


@pytest.mark.parametrize(
    "where", [device("cpu", None), device(version="rocm 6"), device("gpu", "gfx942"), device("gpu", None)]
)
def test_no_route(on, where):
    on(where)
    assert found() is None


def test_tpu(on):
    """Its kernels have run on none: only where they are asked for."""
    on(device("tpu", None, "TPU v5 lite"))
    assert found() is None
    assert found(asked=True) == "tpu"


def test_one_route_only(on):
    on(device())
    with routes.only("triton"):
        assert found() == "triton"
        with routes.only("tpu"):
            assert found() is None
        assert found() == "triton"
    assert found() == "mosaic"
    with pytest.raises(ValueError, match=r"\bname\b.*cuda"), routes.only("cuda"):
        pass


def test_an_operation_that_a_route_lacks(on):
    on(device())
    assert routes.compiled("commit", **CASE) is None
    assert "commit" in routes.interpreted("commit", **CASE)


def test_default_device_follows_the_configuration():
    cpu = jax.devices("cpu")[0]
    for chosen in (cpu, "cpu"):
        with jax.default_device(chosen):
            assert routes.default_device() == cpu


def test_a_size_no_kernel_has():
    """An explicit choice says why it can't be had; None takes XLA."""
    g = ops.GateParams(None, np.zeros((1, 272), np.float32))
    one = np.zeros((1, 1, 272), np.float32)
    arguments = one, one, np.zeros((1, 1, 8), np.float32), one, np.zeros((1, 1), np.float32), g
    arguments += np.zeros((2, 1, 8, 272), np.float32), np.ones(1, np.int32)
    with pytest.raises(ValueError, match=r"implementation='pallas'.*kda_decode.*K must be in \[1, 256\], got 272"):
        ops.kda_decode(*arguments, implementation="pallas")
    jax.eval_shape(ops.kda_decode, *arguments)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="looks at what a CPU does")
def test_none_never_interprets():
    assert routes.compiled("verify", **CASE) is None
    assert routes.interpreted("verify", **CASE).interpret
