"""What a measurement was made on."""

import datetime
import os
import platform
from pathlib import Path

import jax


def describe() -> dict[str, str | int]:
    """Date, processor, usable cores, accelerator and versions."""
    devices = jax.devices()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "backend": jax.default_backend(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def sentence(machine: dict[str, str | int]) -> str:
    """``machine`` on one line."""
    device = "" if machine["backend"] == "cpu" else f"{machine['devices']} x {machine['device']}, "
    return (
        f"{machine['date']}: {device}{machine['cpu']}, {machine['cores']} cores, "
        f"jax {machine['jax']} ({machine['backend']}), Python {machine['python']}"
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
