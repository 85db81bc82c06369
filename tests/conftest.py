"""The test session: strict shapes, the ``--slow`` switch and hypothesis profiles."""

import gc
import os
from pathlib import Path

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", default=False, help="run the tests marked slow too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: give --slow to run it")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


MAPS = Path("/proc/self/maps")
MOST_MAPS = 20_000  # the system's limit is 65,530 by default


def release():
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def release_what_a_module_compiled():
    """Thousands of programs in one process run into the system's limit of memory maps, and XLA then crashes."""
    yield
    release()


@pytest.fixture(autouse=True)
def release_many_programs():
    """The same within a module that compiles very much."""
    yield
    if MAPS.is_file() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        release()
