"""``kda-jax bench kernels``: which rows there are and what their bytes are. Never how fast anything is."""

import json

import pytest

from kda_jax.bench import kernels
from kda_jax.bench.operations import Shape
from kda_jax.cli import main

SMALL = ("--shape", "B=2,H=2,HV=4,K=16,V=24,W=3", "--pool-mib", "1", "--repeats", "1", "--steps", "4")


def test_every_operation_has_a_row_on_every_implementation_that_runs_here(capsys, tmp_path):
    file = tmp_path / "kernels.json"
    assert main(["bench", "kernels", *SMALL, "--output", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text()) == report
    of_xla = [row for row in report["rows"] if row["implementation"] == "xla"]
    assert [row["op"] for row in of_xla] == list(kernels.CASES)
    assert all(row["seconds"] > 0 and row["floor_seconds"] > 0 for row in report["rows"])
    if report["machine"]["backend"] == "cpu":  # nothing is interpreted for a time
        assert len(of_xla) == len(report["rows"])


def test_bytes(capsys):
    assert main(["bench", "kernels", *SMALL, "--ops", "verify", "commit", "verify, commit", "--json"]) == 0
    verify, commit, both = (row["bytes"] for row in json.loads(capsys.readouterr().out)["rows"])
    state = 2 * 4 * 24 * 16 * 4
    activations = 2 * 3 * (2 * 2 * 16 + 2 * 4 * 24 + 4 * 16 + 4) * 2  # q, k; v and o; gate; beta, bf16
    record = 2 * (4 * 24 * 4 + (2 + 4) * 16 * 2)  # of a token of each row: correction; key and gate
    assert verify == state + activations + 3 * record
    assert commit == 2 * state + 2 * record  # two of three tokens are accepted on average
    assert both == verify + commit


def test_the_shapes_to_compare_by():
    assert [(s.B, s.H, s.W) for s in kernels.DEFAULT_SHAPES] == [
        (1, 32, 8), (8, 32, 8), (64, 32, 4), (64, 32, 8), (1, 96, 8), (16, 96, 8), (128, 12, 8),
    ]  # fmt: skip
    assert all(s.K == s.V == 128 for s in kernels.DEFAULT_SHAPES)
    assert kernels.DEFAULT_SHAPES[0] == Shape(B=1, H=32, W=8)


@pytest.mark.parametrize(("option", "value"), [("--steps", "0"), ("--repeats", "0"), ("--shape", "B=two")])
def test_refusals(capsys, option, value):
    assert main(["bench", "kernels", option, value]) != 0
    assert option in capsys.readouterr().err
