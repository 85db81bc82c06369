"""Shape, dtype and implementation checks of the operations; every failure is a ValueError naming the argument."""

import jax.numpy as jnp

from kda_jax.checks import IMPLEMENTATIONS


class Dims:
    """Sizes of named dimensions, bound by the first argument that shows them and checked against the others.

    ``dims.check("q", q, "B T H K")`` binds or compares each letter; a number stands for itself.
    """

    def __init__(self, **sizes: int):
        self.sizes = dict(sizes)
        self._source = {name: f"{name}={size}" for name, size in sizes.items()}

    def check(self, name: str, array, spec: str, *, kind: str = "float") -> None:
        axes = spec.split()
        shape = getattr(array, "shape", None)
        if shape is None:
            raise ValueError(f"{name} must be an array [{', '.join(axes)}], got {type(array).__name__}")
        if len(shape) != len(axes):
            raise ValueError(f"{name} must have shape [{', '.join(axes)}], got {tuple(shape)}")
        for axis, size in zip(axes, shape, strict=True):
            wanted = int(axis) if axis.isdigit() else self.sizes.setdefault(axis, size)
            if size != wanted:
                where = self._source.get(axis, f"{axis}={wanted}")
                raise ValueError(f"{name} must have shape [{', '.join(axes)}] with {where}, got {tuple(shape)}")
            self._source.setdefault(axis, f"{axis}={size} as in {name}")
        allowed = {"float": jnp.floating, "int": jnp.integer}[kind]
        if not jnp.issubdtype(array.dtype, allowed):
            words = {"float": "a floating-point", "int": "an integer"}[kind]
            raise ValueError(f"{name} must have {words} dtype, got {array.dtype}")

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def check_groups(self, name: str = "v") -> None:
        """Value heads share query/key heads in equal groups: ``HV % H == 0``."""
        H, HV = self["H"], self["HV"]
        if H == 0 or HV % H:
            raise ValueError(
                f"{name}: the HV value heads must be a multiple of the H query/key heads, got HV={HV}, H={H}"
            )


def check_fp32(name: str, array) -> None:
    if array.dtype != jnp.float32:
        raise ValueError(f"{name} must be float32, got {array.dtype}")


# Operations that have Pallas kernels beside their XLA forms.
KERNELS = (
    "kda_decode",
    "kda_verify",
    "kda_commit",
    "kda_verify_after_commit",
    "conv_step",
    "conv_commit",
    "conv_step_after_commit",
)


def choose(operation: str, implementation: str | None) -> None:
    """``ValueError`` unless ``operation`` has such an ``implementation``. ``_kernels.find_kernel`` says what runs."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None, 'xla' or 'pallas', got {implementation!r}")
    if implementation == "pallas" and operation not in KERNELS:
        raise ValueError(f"implementation={implementation!r}: {operation} has no such kernel; use None or 'xla'")
