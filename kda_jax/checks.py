"""Argument checks whose messages name the argument, what it was and what is allowed."""

import math
from typing import Any

IMPLEMENTATIONS = (None, "xla", "pallas")  # of the operations; None: the best that runs here


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ``ValueError`` naming ``name`` unless ``value`` is an integer in ``[low, high]``."""
    bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be an integer {bound}, got {value!r}")


def check_number(name: str, value: Any, *, above: float) -> None:
    """Raise ``ValueError`` naming ``name`` unless ``value`` is a finite number greater than ``above``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= above:
        raise ValueError(f"{name} must be a finite number above {above}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise ``ValueError`` naming ``name`` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: Any, allowed: tuple) -> None:
    """Raise ``ValueError`` naming ``name`` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_gate_bound(name: str, bound: Any) -> None:
    """Raise ``ValueError`` naming ``name`` unless ``bound`` is None or a number in ``[-5, 0)``."""
    if bound is None:
        return
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -5 <= bound < 0:
        raise ValueError(f"{name} must be None or in [-5, 0), got {bound!r}")
