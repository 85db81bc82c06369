"""Bytes and requests of a serving configuration, against sums written out."""

import io
import json

import pytest
import rich.console

from kda_jax import cli
from kda_jax.cache_layout import CacheSizes
from kda_jax.capacity import KIMI_K3, PUBLISHED_BUDGET, Capacity, format_kimi_k3
from tests.tiny import TINY

MiB = 1 << 20


def test_what_four_sequences_of_kimi_k3_hold_for_seven_drafts():
    """The published 12 GB: 69 layers of 96 heads of 128 x 128 fp32, 4 sequences, 7 drafts."""
    assert Capacity(KIMI_K3, window=8, context=1).alternatives(4) == 12_155_092_992


def test_kimi_k3_has_its_published_state():
    layout = Capacity(KIMI_K3, window=8, context=1).layout
    assert layout.state("state").nbytes == 414 * MiB
    assert layout.state("conv").nbytes == 69 * 216 * 1024
    assert layout.state("latents").nbytes == 27_648


def test_one_rank_of_kimi_k3_at_128k():
    rank = Capacity(KIMI_K3, window=8, context=131072, ranks=8)
    slot = 69 * (12 * 128 * 128 * 4 + 3 * 3 * 12 * 128 * 2)
    latents = (131072 + 64) * 24 * 576 * 2  # the window's last tokens open one page more
    inputs = 69 * 8 * 3 * 12 * 128 * 2
    records = 69 * 12 * 8 * (128 * 4 + 128 * 2 + 128 * 2)
    assert rank.native == 8 * slot + latents + inputs
    assert rank.recover == slot + latents + inputs + records
    assert rank.gain == pytest.approx(100 * (rank.native - rank.recover) / rank.recover)
    assert rank.recover_deferred == slot + latents + 2 * (inputs + records)
    assert 10 < rank.gain_deferred < rank.gain < 11
    assert (PUBLISHED_BUDGET // rank.native, PUBLISHED_BUDGET // rank.recover) == (12, 13)


def test_unequal_sizes():
    whole = Capacity(CacheSizes.from_config(TINY), window=3, context=5, page_size=4, dtype="float32")
    slot = 2 * 4 * (4 * 10 * 6 + 3 * (2 * 2 * 6 + 4 * 10))
    assert whole.slot == slot
    assert whole.latents == 8 * 13 * 4  # 5 tokens and 2 more: two pages
    assert whole.native == 3 * slot + whole.latents + 2 * 3 * 64 * 4
    assert whole.recover == slot + whole.latents + 2 * 3 * 4 * (64 + 4 * 10 + 2 * 6 + 4 * 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window must be an integer at least 1, got 0"),
        ({"context": 0}, "context must be"),
        ({"page_size": 0}, "page_size must be"),
        ({"ranks": 5}, "ranks must divide the model's 96 heads, got 5"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Capacity(**({"sizes": KIMI_K3, "window": 8, "context": 1} | arguments))


def test_the_report_says_what_it_assumes():
    out = io.StringIO()
    rank = Capacity(KIMI_K3, window=8, context=131072, ranks=8)
    report = format_kimi_k3(rank, budget=PUBLISHED_BUDGET, sequences=4)
    rich.console.Console(file=out, width=160).print(report)
    text = " ".join(out.getvalue().split())
    for part in (
        "12,155,092,992",
        "414.0 MiB",
        "+10.97 %",
        "+10.46 %",
        f"{rank.gain_deferred:+.2f} %",
        "Assumed: 8 tensor-parallel ranks",
        "not public",
    ):
        assert part in text, part


def test_inspect_prints_it(capsys):
    assert cli.main(["inspect", "kimi_linear_48b", "--context", "1000", "--budget", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["capacity"]
    assert found["held_for_drafts"] == 4 * 7 * 40 * MiB
    assert found["native_requests"] < found["recover_requests"] == (1 << 30) // found["recover_bytes"]
    assert cli.main(["inspect", "kimi_k3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "weights are not supported yet" in text
    assert "12,155,092,992" in text


def test_inspect_kimi_k3_takes_its_arguments(capsys):
    assert cli.main(["inspect", "kimi_k3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["capacity"]
    assert (found["ranks"], found["context"], found["budget"]) == (8, 131072, PUBLISHED_BUDGET)
    assert (found["native_requests"], found["recover_requests"]) == (12, 13)
    assert cli.main(["inspect", "kimi_k3", "--json", "--ranks", "1", "--context", "64", "--window", "8"]) == 0
    found = json.loads(capsys.readouterr().out)["capacity"]
    assert (found["ranks"], found["context"]) == (1, 64)
    assert found["held_for_drafts"] == 12_155_092_992
    assert found["native_bytes"] == Capacity(KIMI_K3, window=8, context=64).native


@pytest.mark.parametrize("model", ["kimi_linear_48b", "kimi_k3"])
@pytest.mark.parametrize(
    "arguments",
    [
        *(["--budget", "0"], ["--sequences", "0"], ["--ranks", "7"], ["--ranks", "0"], ["--window", "0"]),
        *(["--context", "-1"], ["--context", "0"], ["--page-size", "0"]),
    ],
)
def test_inspect_refuses(model, arguments, capsys):
    assert cli.main(["inspect", model, *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
