"""Which route runs a kernel: the one place that looks at backend, device, jax version, sizes and dtypes.

Routes are modules with the same functions: ``mosaic`` (NVIDIA Hopper and newer, jax >= 0.11), ``triton`` (NVIDIA from
compute capability 8.0), ``tpu``. Where none runs compiled, the Triton route's kernels run in interpret mode.
"""

import contextlib
import dataclasses
import functools
import importlib
import types
from collections.abc import Callable, Iterator

import jax

ROUTES = ("mosaic", "triton", "tpu")  # in the order of preference
ON_REQUEST = ("tpu",)  # never run on a device yet: only where kernels are asked for
_only: list[str] = []


@dataclasses.dataclass(frozen=True)
class Route:
    """A module of kernels, and whether they are interpreted."""

    name: str
    module: types.ModuleType
    interpret: bool = False

    def kernel(self, op: str) -> Callable:
        """The function ``op`` of the route."""
        return functools.partial(getattr(self.module, op), interpret=self.interpret)


@contextlib.contextmanager
def only(name: str) -> Iterator[None]:
    """Within it, what is traced takes the route ``name`` or none: for benchmarks and tests."""
    if name not in ROUTES:
        raise ValueError(f"name must be one of {', '.join(ROUTES)}, got {name!r}")
    _only.append(name)
    try:
        yield
    finally:
        _only.pop()


def compiled(op: str, *, asked: bool = False, **case) -> Route | None:
    """The best route that runs ``op`` compiled on the default device, or None.

    Args:
      op: name of the function, such as ``"verify"``.
      asked: whether a kernel was asked for; otherwise routes that no device has run are left out.
      case: ``K``, ``V``, ``W``, ``dtype`` (of activations) and ``state_dtype``.
    """
    device = default_device()
    for name in _only[-1:] or ROUTES:
        if _runs_on(name, device) and (asked or name not in ON_REQUEST):
            module = _module(name)
            if module is not None and _refusal(module, op, case, device.device_kind) is None:
                return Route(name, module)
    return None


def interpreted(op: str, **case) -> Route | str:
    """The route that interprets ``op`` anywhere, or why nothing does."""
    module = _module("triton")
    reason = _refusal(module, op, case, "interpreter")
    return Route("triton", module, interpret=True) if reason is None else reason


def default_device() -> jax.Device:
    """Where jax puts a computation that nothing else places."""
    chosen = jax.config.jax_default_device
    if isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return jax.devices()[0] if chosen is None else chosen


def _runs_on(name: str, device: jax.Device) -> bool:
    if name == "tpu":
        return device.platform == "tpu"
    capability = _compute_capability(device)
    if name == "mosaic":
        return capability is not None and capability >= (9, 0) and _jax_version() >= (0, 11)
    return capability is not None and capability >= (8, 0)


def _compute_capability(device: jax.Device) -> tuple[int, ...] | None:
    """Of an NVIDIA GPU; None for anything else."""
    if device.platform not in ("gpu", "cuda") or "rocm" in getattr(device.client, "platform_version", ""):
        return None
    parts = str(getattr(device, "compute_capability", "")).split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else None


def _jax_version() -> tuple[int, ...]:
    return tuple(int(part) for part in jax.__version__.split(".")[:2])


@functools.cache
def _module(name: str) -> types.ModuleType | None:
    """The route's module; None where this installation has none."""
    wanted = f"pallas_kernels.{name}"
    try:
        return importlib.import_module(wanted)
    except ModuleNotFoundError as error:
        if error.name != wanted:
            raise
        return None


def _refusal(module, op, case, device_kind) -> str | None:
    if not hasattr(module, op):
        return f"there is no such kernel as {op}"
    return module.supports(op, **case, device_kind=device_kind)
