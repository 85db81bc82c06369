"""Which implementations each operation has. A test that takes `implementation` runs once for each of them.

A module names the operations it calls in `OPS`, or a test its own with `harness.calls`; with several, the
implementations that all of them have are run.
A new kernel is added to this table and nowhere else.
"""

from tests.ops import harness

IMPLEMENTATIONS = {
    "kda_gate": ("xla",),
    "conv_prefill": ("xla",),
    "conv_step": ("xla", "pallas"),
    "conv_commit": ("xla", "pallas"),
    "kda_recurrent": ("xla",),
    "kda_chunked": ("xla",),
    "kda_decode": ("xla", "pallas"),
    "kda_verify": ("xla", "pallas"),
    "kda_verify_native": ("xla",),
    "kda_commit": ("xla", "pallas"),
    "kda_verify_after_commit": ("xla", "pallas"),
    "conv_step_after_commit": ("xla", "pallas"),
    "plan_commit": ("xla",),
}


def pytest_configure(config):
    harness.optimise = config.getoption("--slow")


def pytest_generate_tests(metafunc):
    if "implementation" in metafunc.fixturenames:
        first, *rest = getattr(metafunc.function, "operations", None) or metafunc.module.OPS
        shared = [name for name in IMPLEMENTATIONS[first] if all(name in IMPLEMENTATIONS[op] for op in rest)]
        metafunc.parametrize("implementation", shared)
