"""Whole calls of ``generate``: greedy, one prompt at a time, stop tokens ignored, everything compiled beforehand.

A time is the wall clock of one call, prompt included, from numpy arrays in to finished tokens. All prompts share one
padded size, so each way of decoding is one compiled program.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Group
from rich.table import Table

from kda_jax.accounting import account, format_bytes
from kda_jax.bench import machine
from kda_jax.checkpoint import ASSETS, Model, load
from kda_jax.checks import check_integer
from kda_jax.generation import generate
from kda_jax.options import GenerateOptions, SpeculativeOptions

PROMPTS = ASSETS / "prompts.json"
Decode = Callable[[np.ndarray], np.ndarray]  # prompt token ids -> new token ids


def read_prompts(file: Path) -> list[str]:
    """The texts of a JSON list of objects with ``text``. Raises ``ValueError`` naming the file."""
    try:
        texts = [prompt["text"] for prompt in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f'--prompts {file}: must be a JSON list of {{"text": ...}} ({error!r})') from None
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"--prompts {file}: every text must be a string that is not empty, and there must be one")
    return texts


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run ``kda-jax bench generate``; the report that ``--json`` prints. Speeds in tokens/s, sizes in bytes."""
    for name in ("timed", "repeats", "max_new_tokens"):
        check_integer("--" + name.replace("_", "-"), getattr(args, name), 1)
    options = GenerateOptions(max_new_tokens=args.max_new_tokens)
    ngram = {
        name: SpeculativeOptions("ngram", args.num_draft_tokens, recover=recover)
        for name, recover in (("ngram, recovered", True), ("ngram, native", False))
    }
    texts = read_prompts(args.prompts or PROMPTS)
    if args.against_transformers:
        from kda_jax.bench import reference  # a missing extra is reported before anything is run
    model = load(args.model, dtype=args.dtype or ("float32" if jax.default_backend() == "cpu" else None))
    if model.tokenizer is None:
        raise ValueError(f"{model.path}: no tokenizer in this folder, so it can't read text prompts")
    prompts = [np.asarray(model.tokenizer.encode(text), np.int32) for text in texts]
    width = max(map(len, prompts))
    acceptance, decoders = {}, {}
    for name, speculative in {"plain": None, **ngram}.items():
        call = _call(model, width, options, speculative)
        decoders[name] = lambda prompt, call=call: np.asarray(call(prompt).tokens[0])
        if name == "ngram, recovered":
            _progress(f"n-gram drafts for {len(prompts)} prompts")
            acceptance = _acceptance([call(prompt).stats for prompt in prompts], len(prompts) * args.max_new_tokens)
    versions = {}
    if args.against_transformers:
        references, versions = reference.decoders(model, args.max_new_tokens)
        decoders |= references
    timed = prompts[: args.timed]
    runs = time_decoders(decoders, timed, args.repeats)
    numbers = account(model.config, window=1 + args.num_draft_tokens)
    tokens = width + args.max_new_tokens
    report = {
        "machine": machine.describe() | versions,
        "model": "the model that ships" if args.model is None else str(args.model),
        "dtype": model.config.dtype,
        "prompts": len(prompts),
        "timed_prompts": len(timed),
        "prompt_tokens": {"median": statistics.median(map(len, prompts)), "most": width},
        "new_tokens": args.max_new_tokens,
        "num_draft_tokens": args.num_draft_tokens,
        "repeats": args.repeats,
        "decoders": runs,
        "acceptance": acceptance,
        "state_bytes": {
            "tokens": tokens,
            "recovered": numbers.state_bytes(tokens, recover=True),
            "native": numbers.state_bytes(tokens, recover=False),
        },
    }
    if args.against_transformers:
        theirs = max(runs[name]["tokens_per_second"] for name in references)
        report["times_transformers"] = {name: run["tokens_per_second"] / theirs for name, run in runs.items()}
    return report


def _call(model: Model, width: int, options: GenerateOptions, speculative: SpeculativeOptions | None) -> Callable:
    def call(prompt: np.ndarray):
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(prompt)] = prompt
        lengths = np.asarray([len(prompt)], np.int32)
        key = jax.random.key(0)
        result = generate(model.params, model.config, tokens, lengths, key, options=options, speculative=speculative)
        return jax.block_until_ready(result)

    return call


def _acceptance(stats: list[Any], emitted: int) -> dict[str, Any]:
    """Acceptance length over all prompts, (emitted - 1 per prompt) / steps, and counts by position in the window."""
    steps = sum(int(s.steps[0]) for s in stats)
    drafted, accepted = (sum(np.asarray(getattr(s, name)[0]) for s in stats) for name in ("drafted", "accepted"))
    return {
        "length": (emitted - len(stats)) / steps if steps else None,
        "steps": steps,
        "drafted": drafted.tolist(),
        "accepted": accepted.tolist(),
    }


def time_decoders(decoders: dict[str, Decode], prompts: list[np.ndarray], repeats: int) -> dict[str, dict[str, Any]]:
    """Time every decoder on every prompt ``repeats`` times, decoders taking turns, after one run that isn't counted.

    Returns, by name, ``tokens_per_second`` (median over all its runs, of emitted tokens over wall clock), the
    ``slowest`` and ``fastest`` run, and for how many prompts its tokens are those of the first decoder (``agrees``),
    with the first position where the others differ.
    """
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    outputs: dict[str, list[np.ndarray]] = {}
    for decode in decoders.values():
        decode(prompts[0])
    for turn in range(repeats):
        for name, decode in decoders.items():
            _progress(f"run {turn + 1} of {repeats}: {name}")
            outputs[name] = []
            for prompt in prompts:
                start = time.perf_counter()
                tokens = decode(prompt)
                speeds[name].append(len(tokens) / (time.perf_counter() - start))
                outputs[name].append(tokens)
    expected = outputs[next(iter(decoders))]
    report = {}
    for name, tokens in outputs.items():
        differ = [_first_difference(a, b) for a, b in zip(tokens, expected, strict=True)]
        report[name] = {
            "tokens_per_second": statistics.median(speeds[name]),
            "slowest": min(speeds[name]),
            "fastest": max(speeds[name]),
            "agrees": differ.count(None),
            "first_differences": [where for where in differ if where is not None],
        }
    return report


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    if len(a) != len(b):
        return min(len(a), len(b))
    different = np.flatnonzero(a != b)
    return int(different[0]) if different.size else None


def tables(report: dict[str, Any]) -> Group:
    """``measure``'s report for a terminal."""
    count, ratios = report["timed_prompts"], report.get("times_transformers", {})
    speed = Table(
        "", "tokens/s", "slowest", "fastest", f"same tokens (of {count})", title="greedy, one prompt at a time"
    )
    if ratios:
        speed.add_column("x transformers")
    for name, run in report["decoders"].items():
        cells = [f"{run[key]:,.0f}" for key in ("tokens_per_second", "slowest", "fastest")]
        cells.append("-" if name == "plain" else str(run["agrees"]))
        if ratios:
            cells.append(f"{ratios[name]:.1f}")
        speed.add_row(name, *cells)

    acceptance = report["acceptance"]
    title = f"n-gram drafts over {report['prompts']} prompts"
    drafts = Table("position", "drafted", "accepted", "share", title=title)
    for i, (drafted, accepted) in enumerate(zip(acceptance["drafted"], acceptance["accepted"], strict=True), 1):
        drafts.add_row(str(i), f"{drafted:,}", f"{accepted:,}", f"{accepted / drafted:.2f}" if drafted else "-")

    state = report["state_bytes"]
    for table in (speed, drafts):
        for column in table.columns[1:]:
            column.justify = "right"
    length = "-" if acceptance["length"] is None else f"{acceptance['length']:.2f}"
    return Group(
        machine.sentence(report["machine"]),
        f"{report['model']}, {report['dtype']}: prompts of {report['prompt_tokens']['median']:g} tokens (median), "
        f"{report['new_tokens']} new tokens, {report['repeats']} runs of {count} prompts; medians",
        speed,
        drafts,
        f"acceptance length {length} tokens a step over {acceptance['steps']:,} steps",
        f"state per request of {state['tokens']} tokens, window of {1 + report['num_draft_tokens']}: "
        f"{format_bytes(state['recovered'])} with recovery, {format_bytes(state['native'])} with a state per draft",
    )
