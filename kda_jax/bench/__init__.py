"""``kda-jax bench``: what this machine does. ``generate`` times whole calls, ``speculative`` compares ways of
speculating, ``ops`` times single operations, ``kernels`` the Pallas kernels beside XLA, ``metadata`` the host side of a
step."""

import argparse
import json
from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16")


def _add_part(parts, name: str, text: str) -> argparse.ArgumentParser:
    """A subcommand; ``--json`` is what all of them have."""
    part = parts.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    part.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return part


def _add_model(part: argparse.ArgumentParser) -> None:
    part.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face folder (default: the shipped model)")
    part.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's; float32 on a CPU")
    part.add_argument(
        "--prompts", type=Path, metavar="F", help='JSON list of {"text": ...} (default: held-out Python prompts)'
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments that ``run`` reads."""
    from kda_jax.bench import kernels, metadata, operations, speculative

    parts = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    text = "tokens/s and acceptance length of greedy decoding, one prompt at a time"
    generate = _add_part(parts, "generate", text)
    _add_model(generate)
    generate.add_argument("--timed", type=int, default=8, metavar="N", help="prompts timed (default %(default)s)")
    generate.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default %(default)s")
    generate.add_argument("--num-draft-tokens", type=int, default=7, metavar="M", help="default %(default)s")
    generate.add_argument("--repeats", type=int, default=3, help="timed runs of each prompt (default %(default)s)")
    generate.add_argument(
        "--against-transformers",
        action="store_true",
        help="also time transformers' KimiLinearForCausalLM.generate on the same weights (parity extra)",
    )

    compare = _add_part(parts, "speculative", "ways of speculating on the same prompts, drafting and verifying apart")
    _add_model(compare)
    speculative.add_arguments(compare)

    metadata.add_arguments(_add_part(parts, "metadata", "host time of building a step's metadata"))

    text = "the kernels on a slot pool beside XLA: time, bytes and bandwidth floor"
    kernels.add_arguments(_add_part(parts, "kernels", text))

    ops = _add_part(parts, "ops", "time, bytes and bandwidth floor of the operations")
    ops.add_argument(
        "--ops", nargs="+", choices=operations.NAMES, default=list(operations.NAMES), metavar="OP", help="default: all"
    )
    ops.add_argument(
        "--shape",
        action="append",
        metavar="B=8,H=32,K=128,V=128,W=8,T=512",
        help="requests, heads (HV: value heads), dims, window and prompt tokens; may be given again. Default: a few",
    )
    ops.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of activations (default %(default)s)")
    ops.add_argument("--repeats", type=int, default=5, help="timed runs of each loop (default %(default)s)")
    ops.add_argument(
        "--pool-mib", type=int, default=256, help="size of the state pool walked over (default %(default)s)"
    )
    ops.add_argument("--implementation", choices=("xla", "pallas"), help="default: the best that runs here")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises ``ValueError`` for arguments that make no sense."""
    from kda_jax.bench import generation, kernels, metadata, operations, speculative

    parts = {
        "generate": generation,
        "speculative": speculative,
        "metadata": metadata,
        "kernels": kernels,
        "ops": operations,
    }
    part = parts[args.what]
    report = part.measure(args)
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    from rich.console import Console

    Console().print(part.tables(report))
    return 0
