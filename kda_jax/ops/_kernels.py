"""From an operation to a kernel: which one runs, and what every kernel's arguments are checked for."""

from kda_jax.ops._checks import Dims, check_fp32, choose
from pallas_kernels import routes


def find_kernel(operation: str, implementation: str | None, **case):
    """The kernel that runs ``operation``, or None for the XLA form.

    ``implementation=None``: the best route that runs compiled here, else XLA. ``"pallas"``: that route, else the
    interpreter, else ``ValueError`` saying why. ``"xla"``: XLA.

    Args:
      case: ``K``, ``V``, ``W``, ``dtype``, ``state_dtype`` as in ``routes.compiled``.
    """
    choose(operation, implementation)
    if implementation == "xla":
        return None
    op = operation.removeprefix("kda_")
    route = routes.compiled(op, asked=implementation == "pallas", **case)
    if route is None and implementation == "pallas":
        route = routes.interpreted(op, **case)
        if isinstance(route, str):
            raise ValueError(f"implementation='pallas': {operation} has no kernel for these arguments: {route}")
    return None if route is None else route.kernel(op)


def check_gate_params(dims: Dims, gate, lead: str = "") -> None:
    """``ValueError`` unless ``gate`` fits ``HV`` and ``K`` and is fp32; ``lead`` is ``"L "`` with a layer axis."""
    dims.check("gate.dt_bias", gate.dt_bias, lead + "HV K")
    check_fp32("gate.dt_bias", gate.dt_bias)
    if gate.A_log is not None:
        dims.check("gate.A_log", gate.A_log, lead + "HV")
        check_fp32("gate.A_log", gate.A_log)


def gate_arguments(gate):
    """``A_log``, ``dt_bias``, ``lower_bound``: how kernels take a gate."""
    return gate.A_log, gate.dt_bias, gate.lower_bound
