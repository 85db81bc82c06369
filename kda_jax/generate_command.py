"""``kda-jax generate``: stream a continuation, then say how it went."""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

DEFAULT_NEW_TOKENS = 256
STEPS_PER_CHUNK = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments that ``run`` reads."""
    from kda_jax.options import REJECTIONS

    parser.add_argument("prompt", nargs="?", metavar="PROMPT")
    parser.add_argument("--prompt-file", type=Path, metavar="F", help="read the prompt from a file")
    parser.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face folder (default: the model that ships)")
    parser.add_argument("--dtype", help="bfloat16, float16 or float32 (default: the checkpoint's; float32 on a CPU)")
    parser.add_argument("--chat", action="store_true", help="lay the prompt out with the model's chat template")
    parser.add_argument("--preset", metavar="NAME", help="run preset; the options below override it")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help=f"default {DEFAULT_NEW_TOKENS}")
    parser.add_argument("--temperature", type=float, help="0: greedy (default)")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default %(default)s)")
    parser.add_argument("--ignore-stop", action="store_true", help="do not stop at the model's end token")
    parser.add_argument("--speculative", metavar="METHOD", help="ngram, or draft with --drafter")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="folder of a smaller model that drafts")
    parser.add_argument(
        "--branches", metavar="N,N,..", help="n-gram drafts as a tree: how many each continuation adds; sets M"
    )
    parser.add_argument("--num-draft-tokens", type=int, metavar="M", help="drafts a step (default 7)")
    parser.add_argument("--rejection", choices=[r for r in REJECTIONS if r != "synthetic"])
    parser.add_argument("--no-recover", action="store_true", help="keep a state per draft instead of records")
    parser.add_argument("--implementation", choices=("xla", "pallas"))
    parser.add_argument("--quiet", action="store_true", help="print the text alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")


def make_options(args: argparse.Namespace, stop_tokens):
    """``GenerateOptions`` and ``SpeculativeOptions`` (or None) from the arguments and the preset they name."""
    from kda_jax.options import GenerateOptions, SpeculativeOptions
    from kda_jax.presets import Preset, load_preset

    plain = GenerateOptions(max_new_tokens=DEFAULT_NEW_TOKENS)
    preset = load_preset(args.preset) if args.preset else Preset(plain)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "implementation")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    options = dataclasses.replace(preset.generate, stop_tokens=() if args.ignore_stop else stop_tokens, **given)
    changes = {}
    if args.num_draft_tokens is not None:
        changes["num_draft_tokens"] = args.num_draft_tokens
    if args.rejection is not None:
        changes["rejection"] = args.rejection
    if args.no_recover:
        changes["recover"] = False
    if args.branches is not None:
        changes["branches"] = read_branches(args.branches)
        changes.setdefault("num_draft_tokens", sum(changes["branches"]))
    if args.speculative is not None:
        base = {"num_draft_tokens": 7} if preset.speculative is None else dataclasses.asdict(preset.speculative)
        return options, SpeculativeOptions(**(base | {"method": args.speculative} | changes))
    if preset.speculative is not None:
        return options, dataclasses.replace(preset.speculative, **changes)
    for name in changes:
        flag = "--no-recover" if name == "recover" else "--" + name.replace("_", "-")
        raise ValueError(f"{flag} needs --speculative METHOD")
    return options, None


def read_branches(text: str) -> tuple[int, ...]:
    """``--branches`` as numbers."""
    try:
        return tuple(int(count) for count in text.split(","))
    except ValueError:
        raise ValueError(f"--branches must be numbers with commas between them, got {text!r}") from None


def check_drafter(args: argparse.Namespace, speculative) -> None:
    """``--drafter`` is given just where the method needs it."""
    needed = speculative is not None and speculative.method == "draft"
    if needed != (args.drafter is not None):
        raise ValueError("--speculative draft needs --drafter DIR" if needed else "--drafter needs --speculative draft")


def run(args: argparse.Namespace) -> int:
    """Do it. Raises ``ValueError`` for what can't be done, before any weight is read where possible."""
    from kda_jax.checkpoint import load
    from kda_jax.cli import read_prompt
    from kda_jax.generation import stream
    from kda_jax.speculate.draft_model import load_drafter

    text = read_prompt(args.prompt, args.prompt_file)
    check_drafter(args, make_options(args, ())[1])  # refused before weights are read
    default = "float32" if jax.default_backend() == "cpu" else None
    model = load(args.model, dtype=args.dtype or default)
    if model.tokenizer is None:
        raise ValueError(f"{model.path}: no tokenizer in this folder, so it can't read a text prompt")
    options, speculative = make_options(args, model.stop_tokens)
    drafter = None if args.drafter is None else load_drafter(args.drafter, dtype=args.dtype or default)
    tokens = model.tokenizer.apply_chat(text) if args.chat else model.tokenizer.encode(text)
    decoder = model.tokenizer.stream()
    chunks = stream(
        model.params,
        model.config,
        np.asarray([tokens], np.int32),
        np.asarray([len(tokens)], np.int32),
        jax.random.key(args.seed),
        options=options,
        speculative=speculative,
        drafter=drafter,
        steps_per_chunk=STEPS_PER_CHUNK,
    )
    ids, pieces, clock = [], [], []
    if not args.json and not args.chat:
        print(text, end="", flush=True)
    for chunk in chunks:
        clock.append(time.perf_counter())
        ids += chunk.tokens[0].tolist()
        pieces.append(decoder.feed(chunk.tokens[0]))
        if not args.json:
            print(pieces[-1], end="", flush=True)
    pieces.append(decoder.flush())
    if not args.json:
        print(pieces[-1])
    first = len(ids) and 1
    report = _report(model, chunk.stats, len(tokens), len(ids), speculative)
    seconds = clock[-1] - clock[0]
    report["tokens_per_second"] = (len(ids) - first) / seconds if seconds > 0 else None
    if args.json:
        out = {"prompt": text, "text": "".join(pieces), "tokens": ids} | report
        print(json.dumps(out))
    elif not args.quiet:
        print("\n" + _describe(report))
    if report["nan"]:
        print("kda-jax generate: error: the model's logits held NaN; the text ends there", file=sys.stderr)
        return 2
    return 0


def _report(model, stats, prompt: int, emitted: int, speculative) -> dict:
    """What ``--json`` prints beside the text; sizes in bytes."""
    from kda_jax.accounting import account

    window = 1 if speculative is None else speculative.window
    numbers = account(model.config, window=window)
    steps = int(stats.steps[0])
    drafted, accepted = stats.drafted[0].tolist(), stats.accepted[0].tolist()
    return {
        "prompt_tokens": prompt,
        "new_tokens": emitted,
        "steps": steps,
        "acceptance_length": (emitted - 1) / steps if speculative is not None and steps else None,
        "drafted": drafted,
        "accepted": accepted,
        "state_bytes_with_recovery": numbers.state_bytes(prompt + emitted, recover=True),
        "state_bytes_without_recovery": numbers.state_bytes(prompt + emitted, recover=False),
        "window": window,
        "recover": None if speculative is None else speculative.recover,
        "backend": jax.default_backend(),
        "nan": bool(stats.nan[0]),
    }


def _describe(report: dict) -> str:
    from kda_jax.accounting import format_bytes

    speed = report["tokens_per_second"]
    lines = [
        f"{report['new_tokens']} tokens, {'-' if speed is None else format(speed, '.0f')} tokens/s "
        f"after the first on {report['backend']} (compilation and prompt of {report['prompt_tokens']} apart)"
    ]
    if report["acceptance_length"] is not None:
        rates = " ".join(f"{a}/{d}" for a, d in zip(report["accepted"], report["drafted"], strict=True))
        lines.append(f"acceptance length {report['acceptance_length']:.2f} over {report['steps']} steps")
        lines.append(f"accepted/drafted by position: {rates}")
    with_, without = report["state_bytes_with_recovery"], report["state_bytes_without_recovery"]
    if report["recover"] is None:
        lines.append(f"state per request: {format_bytes(with_)}")
    else:
        used = "used here" if report["recover"] else "not used here"
        lines.append(
            f"state per request, window of {report['window']}: {format_bytes(with_)} with recovery ({used}), "
            f"{format_bytes(without)} with a state per draft"
        )
    return "\n".join(lines)
