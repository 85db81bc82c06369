"""Compiling for tests. A module that imports ``quick`` compiles its programs without the optimiser, unless --slow."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick(request):
    """On CPU most of a test's time is spent in the optimiser, which changes rounding and nothing else."""
    wanted = jax.default_backend() == "cpu" and not request.config.getoption("--slow")
    jax.config.update("jax_disable_most_optimizations", wanted)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
