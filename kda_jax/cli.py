"""``kda-jax``: generate text, inspect a configuration, train, measure. A wrong argument is one line and exit code 2."""

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="folder with a config.json, or the name of a configuration; kimi_k3: its cache only"
    )
    parser.add_argument(
        "--window", type=int, default=8, help="tokens of a verify step, 1 + drafts (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    capacity = parser.add_argument_group("how many requests fit")
    capacity.add_argument("--context", type=int, help="tokens of a request (default: 131072, or the model's most)")
    capacity.add_argument("--budget", type=float, default=46.48, help="GiB for the cache (default %(default)s)")
    capacity.add_argument("--sequences", type=int, default=4, help="requests at once (default %(default)s)")
    capacity.add_argument("--page-size", type=int, default=64, help="tokens of a latent page (default %(default)s)")
    capacity.add_argument(
        "--ranks", type=int, default=1, help="tensor-parallel ranks (default %(default)s; kimi_k3: 8)"
    )


def _inspect(args: argparse.Namespace) -> int:
    from kda_jax import accounting, capacity
    from kda_jax.checkpoint import ASSETS
    from kda_jax.checks import check_integer, check_number
    from kda_jax.presets import load_config

    check_number("--budget", args.budget, above=0)
    check_integer("--sequences", args.sequences, 1)
    serving = {"budget": int(args.budget * capacity.GiB), "sequences": args.sequences}
    if args.model == "kimi_k3":
        from rich.console import Console

        if args.json:
            raise ValueError("--json is not available for kimi_k3: its configuration is not supported yet")
        sizes = {"window": args.window, "context": args.context or 131072, "page_size": args.page_size}
        Console().print(capacity.format_kimi_k3(**sizes, **serving))
        return 0
    config = load_config(args.model if args.model is not None else ASSETS)
    numbers = accounting.account(config, window=args.window)
    fit = capacity.Capacity(
        capacity.CacheSizes.from_config(config),
        args.window,
        args.context or min(131072, config.max_length),
        args.ranks,
        args.page_size,
        config.dtype,
    )
    if args.json:
        totals = ("total_parameters", "active_parameters", "weight_bytes")
        window = dataclasses.asdict(numbers.window)
        window |= {"native": numbers.window.native, "recover": numbers.window.recover}
        out = dataclasses.asdict(numbers) | {name: getattr(numbers, name) for name in totals} | {"window": window}
        out["capacity"] = serving | {
            "context": fit.context,
            "ranks": fit.ranks,
            "page_size": fit.page_size,
            "native_bytes": fit.native,
            "recover_bytes": fit.recover,
            "native_requests": serving["budget"] // fit.native,
            "recover_requests": serving["budget"] // fit.recover,
            "held_for_drafts": fit.alternatives(args.sequences),
        }
        print(json.dumps(out, indent=1))
        return 0
    from rich.console import Console

    name = args.model if args.model is not None else "the model that ships"
    Console().print(accounting.format_report(numbers, name=str(name)))
    Console().print(capacity.format_capacity(fit, **serving, name=str(name)))
    return 0


# command -> (what it does, module with add_arguments and run; None: here)
_COMMANDS = {
    "generate": ("continue a prompt", "kda_jax.generate_command"),
    "inspect": ("layers, parameters and bytes of a configuration; no weights needed", None),
    "bench": ("measure on this machine", "kda_jax.bench"),
    "train": ("train a model, such as the one that ships", "kda_jax.train.command"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console script. Returns the exit code: 0, or 2 after one line on stderr saying what was wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="kda-jax", description="Kimi Delta Attention models in JAX.")
    from kda_jax import __version__

    parser.add_argument("--version", action="version", version=f"kda-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (text, module) in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if module is None:
            _inspect_arguments(sub)
            sub.set_defaults(run=_inspect)
        elif name == chosen:  # only the command at hand is imported
            loaded = importlib.import_module(module)
            loaded.add_arguments(sub)
            sub.set_defaults(run=loaded.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"kda-jax {args.command}: error: {message}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = {"optax": "train", "tiktoken": "kimi", "torch": "parity", "transformers": "parity"}.get(
            error.name or ""
        )
        if extra is None:
            raise
        print(
            f"kda-jax {args.command}: error: {error.name} is not installed; pip install 'kda-jax[{extra}]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt that one of the two arguments gives; ``ValueError`` unless exactly one does and it is not empty."""
    if (prompt is None) == (prompt_file is None):
        raise ValueError("give PROMPT or --prompt-file, one of the two")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompt-file {prompt_file}: can't be read ({error})") from None
    if not prompt:
        raise ValueError("PROMPT must not be empty")
    return prompt


if __name__ == "__main__":
    sys.exit(main())
