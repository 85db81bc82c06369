"""``kda-jax``: generate text, inspect a configuration, train, measure. A wrong argument is one line and exit code 2."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


# command -> (what it does, module with add_arguments and run)
_COMMANDS = {
    "generate": ("continue a prompt", "kda_jax.generate_command"),
    "inspect": ("layers, parameters and bytes of a configuration; no weights needed", "kda_jax.inspect_command"),
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
        if name == chosen:  # only the command at hand is imported
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
