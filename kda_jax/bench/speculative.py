"""Ways of speculating on the same prompts: plain decoding, n-gram drafts, trees of them, a draft model.

Tokens per second are of whole calls, prompt included. A step's time is the decode loop's wall clock over its steps; the
drafter's is measured apart, in a compiled loop that does nothing else, and the rest is verify, judging and commit.
"""

import argparse
import functools
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Group
from rich.table import Table

from kda_jax import generation, generation_loop
from kda_jax.bench import machine
from kda_jax.bench.generation import PROMPTS, read_prompts
from kda_jax.checkpoint import load
from kda_jax.checks import check_integer
from kda_jax.generate_command import read_branches
from kda_jax.options import GenerateOptions, SpeculativeOptions
from kda_jax.speculate.draft_model import load_drafter

DRAFT_CALLS = 50  # of a drafter, in the loop that times it
ALL = np.iinfo(np.int32).max


class Method(NamedTuple):
    speculative: SpeculativeOptions | None
    drafter: Any = None


class Run(NamedTuple):
    """One call on one batch."""

    seconds: float  # prompt to last token
    decode_seconds: float  # of those, the loop's
    loop_steps: int
    tokens: list[np.ndarray]
    stats: generation_loop.GenerateStats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments that ``measure`` reads beside ``model``, ``dtype``, ``prompts`` and ``json``."""
    parser.add_argument("--timed", type=int, default=8, metavar="N", help="prompts (default %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="prompts at a time (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default %(default)s")
    parser.add_argument("--num-draft-tokens", type=int, default=7, metavar="M", help="default %(default)s")
    parser.add_argument(
        "--branches", metavar="N,N,..", help="drafts of each continuation of the n-gram tree (default: M-2,1,1)"
    )
    parser.add_argument("--drafter", metavar="DIR", help="folder of a smaller model: method draft is measured too")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each prompt (default %(default)s)")
    parser.add_argument("--implementation", choices=("xla", "pallas"), help="default: the best that runs here")


def methods(args: argparse.Namespace, drafter) -> dict[str, Method]:
    """What is compared, plain decoding first."""
    m = args.num_draft_tokens
    check_integer("--num-draft-tokens", m, 1)
    found = {"plain": Method(None)}
    for name, recover in (("recovered", True), ("native", False)):
        found[f"ngram, {name}"] = Method(SpeculativeOptions("ngram", m, recover=recover))
    if args.branches is not None or m >= 3:
        branches = (m - 2, 1, 1) if args.branches is None else read_branches(args.branches)
        name = "ngram tree " + "+".join(map(str, branches))
        found[name] = Method(SpeculativeOptions("ngram", sum(branches), branches=branches))
    if drafter is not None:
        for name, recover in (("recovered", True), ("native", False)):
            found[f"draft, {name}"] = Method(SpeculativeOptions("draft", m, recover=recover), drafter)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run ``kda-jax bench speculative``; the report that ``--json`` prints. Times in milliseconds."""
    for name in ("timed", "batch", "repeats", "max_new_tokens"):
        check_integer("--" + name.replace("_", "-"), getattr(args, name), 1)
    options = GenerateOptions(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, implementation=args.implementation
    )
    methods(args, None)  # refused before weights are read
    texts = read_prompts(args.prompts or PROMPTS)[: args.timed]
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else None)
    model = load(args.model, dtype=dtype)
    if model.tokenizer is None:
        raise ValueError(f"{model.path}: no tokenizer in this folder, so it can't read text prompts")
    drafter = None if args.drafter is None else load_drafter(args.drafter, dtype=dtype)
    prompts = [np.asarray(model.tokenizer.encode(text), np.int32) for text in texts]
    batches = [_pad(prompts[i : i + args.batch], args.batch) for i in range(0, len(prompts), args.batch)]
    width = max(map(len, prompts))
    batches = [(np.pad(tokens, ((0, 0), (0, width - tokens.shape[1]))), lengths) for tokens, lengths in batches]
    runs: dict[str, list[list[Run]]] = {}
    compared = methods(args, drafter)
    for turn in range(-1, args.repeats):  # the first turn compiles and isn't counted
        for name, method in compared.items():
            print(f"{'warm-up' if turn < 0 else f'run {turn + 1} of {args.repeats}'}: {name}", file=sys.stderr)
            found = [_run(model, options, method, batch) for batch in (batches[:1] if turn < 0 else batches)]
            if turn >= 0:
                runs.setdefault(name, []).append(found)
    expected = [row for run in runs["plain"][0] for row in run.tokens]
    report = {}
    for name, method in compared.items():
        draft = None if method.speculative is None else _draft_time(model, options, method, batches[0])
        report[name] = _summary(runs[name], expected, draft)
    for summary in report.values():
        summary["times_plain"] = summary["tokens_per_second"] / report["plain"]["tokens_per_second"]
    return {
        "machine": machine.describe(),
        "model": "the model that ships" if args.model is None else str(args.model),
        "drafter": args.drafter,
        "dtype": model.config.dtype,
        "prompts": len(prompts),
        "batch": args.batch,
        "prompt_tokens": {"median": statistics.median(map(len, prompts)), "most": width},
        "new_tokens": args.max_new_tokens,
        "num_draft_tokens": args.num_draft_tokens,
        "temperature": args.temperature,
        "repeats": args.repeats,
        "methods": report,
    }


def _pad(prompts: list[np.ndarray], batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as one batch, the last of them again where there are too few."""
    prompts = prompts + [prompts[-1]] * (batch - len(prompts))
    tokens = np.zeros((batch, max(map(len, prompts))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.asarray([len(p) for p in prompts], np.int32)


def _start(model, options, method: Method, batch):
    """The loop's state after prefill, and the function that advances it."""
    arguments = model.params, model.config, *batch, jax.random.key(0), options, *method
    return generation._prepare(*arguments)[:2]


def _run(model, options, method: Method, batch) -> Run:
    start = time.perf_counter()
    state, run = _start(model, options, method, batch)
    jax.block_until_ready(state.emitted)
    middle = time.perf_counter()
    state = jax.block_until_ready(run(state, ALL))
    end = time.perf_counter()
    rows = len(batch[0])
    buffer, lengths, emitted = (np.asarray(x)[:rows] for x in (state.tokens, state.lengths, state.emitted))
    tokens = [row[n - e : n] for row, n, e in zip(buffer, lengths, emitted, strict=True)]
    stats = jax.tree.map(lambda x: np.asarray(x)[:rows], state.stats)
    return Run(end - start, end - middle, int(stats.steps.max()), tokens, stats)


def _draft_time(model, options, method: Method, batch) -> float:
    """Seconds of one call of the drafter."""
    state, run = _start(model, options, method, batch)
    _, sampling, drafter_params, program = run.args
    times = []
    for turn in range(4):
        start = time.perf_counter()
        jax.block_until_ready(_draft_loop(drafter_params, state, sampling, program=program))
        if turn > 0:
            times.append((time.perf_counter() - start) / DRAFT_CALLS)
    return statistics.median(times)


@functools.partial(jax.jit, static_argnames="program")
def _draft_loop(drafter_params, state, sampling, *, program):
    """Call the drafter over and over; every call depends on the one before."""

    def again(_, carry):
        held, drafter, total = carry
        held, total = jax.lax.optimization_barrier((held, total))
        held = generation_loop.with_drafter(held, drafter)
        draft, count = generation_loop.make_drafts(drafter_params, held, sampling, program)
        seen = [jnp.sum(draft.tokens), jnp.sum(count)]
        seen += [] if draft.probs is None else [jnp.sum(draft.probs).astype(jnp.int32)]
        seen += [] if draft.parents is None else [jnp.sum(draft.parents)]
        return state, draft.state, total + sum(seen)

    return jax.lax.fori_loop(0, DRAFT_CALLS, again, (state, state.drafter, jnp.int32(0)))[2]


def _summary(turns: list[list[Run]], expected: list[np.ndarray], draft_seconds: float | None) -> dict[str, Any]:
    """Of one method: medians over its turns, counts of its first."""
    emitted = sum(len(row) for run in turns[0] for row in run.tokens)
    rows = [row for run in turns[0] for row in run.tokens]
    steps = sum(int(run.stats.steps.sum()) for run in turns[0])
    step = statistics.median(run.decode_seconds / max(run.loop_steps, 1) for turn in turns for run in turn)
    drafted, accepted = (
        sum(np.asarray(getattr(run.stats, name)).sum(0) for run in turns[0]) for name in ("drafted", "accepted")
    )
    return {
        "tokens_per_second": statistics.median(emitted / sum(run.seconds for run in turn) for turn in turns),
        "step_ms": 1e3 * step,
        "draft_ms": None if draft_seconds is None else 1e3 * draft_seconds,
        "verify_ms": None if draft_seconds is None else 1e3 * (step - draft_seconds),
        "acceptance_length": (emitted - len(rows)) / steps if steps else None,
        "acceptance_length_by_prompt": [
            (len(row) - 1) / int(n) if n else None
            for run in turns[0]
            for row, n in zip(run.tokens, run.stats.steps, strict=True)
        ],
        "steps": steps,
        "drafted": drafted.tolist(),
        "accepted": accepted.tolist(),
        "same_as_plain": sum(np.array_equal(a, b) for a, b in zip(rows, expected, strict=True)),
        "rows": len(rows),
    }


def tables(report: dict[str, Any]) -> Group:
    """``measure``'s report for a terminal."""

    def number(value, form="{:.2f}"):
        return "-" if value is None else form.format(value)

    greedy = report["temperature"] == 0
    speed = Table(title=f"{'greedy' if greedy else 'sampled'}, {report['batch']} prompt(s) at a time")
    for name in ("", "tok/s", "x plain", "length", "step ms", "draft", "verify"):
        speed.add_column(name, justify="right" if name else "left")
    if greedy:
        speed.add_column("same", justify="right")
    shares = Table(title="share of drafts accepted, by position (a tree: by depth)")
    shares.add_column("")
    most = max(len(run["drafted"]) for run in report["methods"].values())
    for i in range(most):
        shares.add_column(str(i + 1), justify="right")
    for name, run in report["methods"].items():
        cells = [f"{run['tokens_per_second']:,.0f}", f"{run['times_plain']:.2f}", number(run["acceptance_length"])]
        cells += [number(run[key], "{:.3f}") for key in ("step_ms", "draft_ms", "verify_ms")]
        speed.add_row(name, *cells, *([f"{run['same_as_plain']}/{run['rows']}"] if greedy else []))
        if run["drafted"]:
            pairs = zip(run["accepted"], run["drafted"], strict=True)
            shares.add_row(name, *[f"{a / d:.2f}" if d else "-" for a, d in pairs])
    slower = [name for name, run in report["methods"].items() if run["times_plain"] < 1]
    verdict = (
        f"slower than plain decoding here: {', '.join(slower)}" if slower else "all faster than plain decoding here"
    )
    return Group(
        machine.sentence(report["machine"]),
        f"{report['model']}, {report['dtype']}: {report['prompts']} prompts of {report['prompt_tokens']['median']:g} "
        f"tokens (median), {report['new_tokens']} new tokens, {report['repeats']} runs; medians",
        speed,
        "length: tokens a step emits (acceptance length). Of a step's milliseconds, draft is the drafter, verify the "
        "rest: verifying, judging, committing. same: prompts whose tokens are plain decoding's",
        shares,
        verdict,
    )
