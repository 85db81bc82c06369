"""``kda-jax inspect``: layers, parameters and bytes of a configuration, and how many requests fit, without weights."""

import argparse
import dataclasses
import json

from kda_jax import accounting, capacity
from kda_jax.capacity import Capacity, GiB
from kda_jax.checks import check_integer, check_number

CONTEXT = 131072


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="folder with a config.json, or the name of a configuration (default: the model that ships); kimi_k3: its "
        "cache only, from published sizes, since its weights are not supported yet",
    )
    parser.add_argument(
        "--window", type=int, default=8, help="tokens of a verify step, 1 + drafts (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    group = parser.add_argument_group("how many requests fit")
    group.add_argument("--context", type=int, help=f"tokens of a request (default: {CONTEXT}, or the model's most)")
    group.add_argument("--budget", type=float, default=46.48, help="GiB for the cache (default %(default)s)")
    group.add_argument("--sequences", type=int, default=4, help="requests at once (default %(default)s)")
    group.add_argument("--page-size", type=int, default=64, help="tokens of a latent page (default %(default)s)")
    group.add_argument("--ranks", type=int, help="tensor-parallel ranks (default: 1; of kimi_k3: 8)")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    check_number("--budget", args.budget, above=0)
    check_integer("--sequences", args.sequences, 1)
    serving = {"budget": int(args.budget * GiB), "sequences": args.sequences}
    sizes = {"window": args.window, "page_size": args.page_size}
    if args.model == "kimi_k3":
        fit = Capacity(
            capacity.KIMI_K3,
            context=_or(args.context, CONTEXT),
            ranks=_or(args.ranks, capacity.PUBLISHED_RANKS),
            **sizes,
        )
        if args.json:
            print(json.dumps({"capacity": _capacity(fit, **serving)}, indent=1))
        else:
            Console().print(capacity.format_kimi_k3(fit, **serving))
        return 0

    from kda_jax.checkpoint import ASSETS
    from kda_jax.presets import load_config

    config = load_config(_or(args.model, ASSETS))
    numbers = accounting.account(config, window=args.window)
    fit = Capacity(
        capacity.CacheSizes.from_config(config),
        context=_or(args.context, min(CONTEXT, config.max_length)),
        ranks=_or(args.ranks, 1),
        dtype=config.dtype,
        **sizes,
    )
    if args.json:
        totals = ("total_parameters", "active_parameters", "weight_bytes")
        window = dataclasses.asdict(numbers.window)
        window |= {"native": numbers.window.native, "recover": numbers.window.recover}
        out = dataclasses.asdict(numbers) | {name: getattr(numbers, name) for name in totals} | {"window": window}
        print(json.dumps(out | {"capacity": _capacity(fit, **serving)}, indent=1))
        return 0
    name = _or(args.model, "the model that ships")
    Console().print(accounting.format_report(numbers, name=name))
    Console().print(capacity.format_capacity(fit, **serving, name=name))
    return 0


def _or(value, default):
    return default if value is None else value


def _capacity(fit: Capacity, *, budget: int, sequences: int) -> dict:
    """What ``--json`` says of capacity; bytes on one rank."""
    return {
        "budget": budget,
        "sequences": sequences,
        "context": fit.context,
        "ranks": fit.ranks,
        "page_size": fit.page_size,
        "native_bytes": fit.native,
        "recover_bytes": fit.recover,
        "recover_deferred_bytes": fit.recover_deferred,
        "native_requests": budget // fit.native,
        "recover_requests": budget // fit.recover,
        "recover_deferred_requests": budget // fit.recover_deferred,
        "held_for_drafts": fit.alternatives(sequences),
    }
