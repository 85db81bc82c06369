"""``kda-jax train``: prepare a corpus, train, evaluate, write the model's README."""

import argparse
import dataclasses
import json
from pathlib import Path

import jax

from kda_jax.config import ModelConfig
from kda_jax.presets import load_config

ACTIONS = ("run", "prepare", "calibrate", "evaluate", "card")
DEFAULT_CONFIG = "kda_python_6m"
SMOKE_STEPS, SMOKE_MINUTES = 200, 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments that ``run`` reads."""
    from kda_jax.train.step import DTYPES, SCHEDULES, Hyperparameters

    parser.add_argument(
        "action",
        nargs="?",
        default="run",
        choices=ACTIONS,
        help="run: train (the default). prepare: source text to arrays and tokenizer. calibrate: scale a model's "
        "logits until samples of validation prompts repeat little. evaluate: held-out bits per byte and sample quality "
        "of a model folder. card: write a model folder's README from its metrics",
    )
    parser.add_argument(
        "--output", type=Path, help="folder to fill (run, prepare, calibrate); JSON file to write (evaluate)"
    )
    prepare = parser.add_argument_group("prepare")
    prepare.add_argument("--corpus", type=Path, help="folder of Python files; default: the standard library")
    prepare.add_argument("--vocab-size", type=int, default=2048, help="tokenizer entries, special tokens included")
    model = parser.add_argument_group("evaluate, card")
    model.add_argument("--model", type=Path, help="model folder; default: the model that ships")
    model.add_argument("--metrics", type=Path, help="card: metrics.json of the run")
    model.add_argument("--quality", type=Path, help="card: JSON that evaluate wrote")
    model.add_argument("--calibration", type=Path, help="card: JSON that calibrate wrote")
    run_group = parser.add_argument_group("run")
    run_group.add_argument("--data", type=Path, help="folder that prepare filled (also for evaluate)")
    run_group.add_argument("--config", default=DEFAULT_CONFIG, help="config.json, its folder, or the name of one")
    run_group.add_argument("--steps", type=int, default=Hyperparameters.total_steps, help="optimiser steps at most")
    run_group.add_argument("--max-minutes", type=float, help="wall clock; the learning rate decays to its end by then")
    run_group.add_argument(
        "--smoke", action="store_true", help=f"{SMOKE_STEPS} steps, {SMOKE_MINUTES:.0f} minutes at most"
    )
    run_group.add_argument("--checkpoint", type=Path, help="folder of the training state; default: OUTPUT/state")
    run_group.add_argument("--checkpoint-every", type=int, default=2000, help="steps; 0: never")
    run_group.add_argument("--eval-every", type=int, default=500, help="steps")
    run_group.add_argument("--steps-per-call", type=int, default=20)
    run_group.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    run_group.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(Hyperparameters):
        if field.name in ("total_steps", "dtype", "schedule", "remat"):
            continue
        kind = int if isinstance(field.default, int) else float
        run_group.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    run_group.add_argument("--schedule", default=Hyperparameters.schedule, choices=SCHEDULES)
    run_group.add_argument("--remat", action="store_true", help="recompute layers in the backward pass: less memory")
    run_group.add_argument("--dtype", choices=tuple(DTYPES), help="of activations; default: bfloat16, float32 on a CPU")


def run(args: argparse.Namespace) -> int:
    """Do what ``args.action`` says. Raises ``ValueError`` for arguments that make no sense."""
    actions = {"run": _train, "prepare": _prepare, "calibrate": _calibrate, "evaluate": _evaluate, "card": _card}
    return actions[args.action](args)


def _need(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is needed for {args.action!r}")


def _prepare(args: argparse.Namespace) -> int:
    from kda_jax.train.prepare import prepare

    _need(args, "output")
    manifest = prepare(args.output, source=args.corpus, vocab_size=args.vocab_size)
    for name in ("train", "validation", "held_out"):
        part = manifest[name]
        print(f"{name}: {part['files']} files, {part['bytes']:,} bytes, {part['tokens']:,} tokens")
    print(f"{manifest['source']} ({manifest['licence']}) -> {args.output}")
    return 0


def _train(args: argparse.Namespace) -> int:
    from kda_jax.train.loop import TrainOptions, train
    from kda_jax.train.step import Hyperparameters

    _need(args, "data", "output")
    named = {f.name: getattr(args, f.name) for f in dataclasses.fields(Hyperparameters) if hasattr(args, f.name)}
    named["total_steps"] = min(args.steps, SMOKE_STEPS) if args.smoke else args.steps
    named["dtype"] = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    options = TrainOptions(
        data=args.data,
        output=args.output,
        config=load_config(args.config),
        hyper=Hyperparameters(**named),
        checkpoint=args.checkpoint,
        max_minutes=SMOKE_MINUTES if args.smoke else args.max_minutes,
        steps_per_call=args.steps_per_call,
        eval_every=args.eval_every,
        checkpoint_every=args.checkpoint_every,
        seed=args.seed,
        resume=args.resume,
    )
    train(options)
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    import kda_jax
    from kda_jax.model import forward
    from kda_jax.train.calibrate import calibrate, scale_logits
    from kda_jax.train.corpus import read_corpus
    from kda_jax.train.evaluate import read_tokenizer

    _need(args, "model", "data", "output")
    model = kda_jax.load(args.model)
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else None)
    splits, _ = read_corpus(args.data)
    _, record = calibrate(
        kda_jax.load(args.model, dtype=dtype).params,
        model.config,
        read_tokenizer(args.data),
        json.loads((args.data / "validation_prompts.json").read_text()),
        splits["validation"],
        forward=forward,
        seed=args.seed,
    )
    params = scale_logits(model.params, record["scale"])
    kda_jax.save(dataclasses.replace(model, params=params), args.output)
    (args.output / "calibration.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    import kda_jax
    from kda_jax.model import forward
    from kda_jax.train.corpus import read_corpus
    from kda_jax.train.evaluate import held_out_loss, read_tokenizer, sample_quality

    _need(args, "data")
    model = kda_jax.load(args.model, dtype=args.dtype)
    splits, _ = read_corpus(args.data)
    held_out = held_out_loss(model.params, model.config, splits["held_out"], forward=forward, seq_len=args.seq_len)
    print(json.dumps(held_out, indent=1), flush=True)
    prompts = json.loads((args.data / "prompts.json").read_text())
    tokenizer = read_tokenizer(args.data)
    figures, samples = sample_quality(model.params, model.config, tokenizer, prompts, seed=args.seed)
    print(json.dumps(figures, indent=1))
    if args.output is not None:
        content = figures | {f"held_out_{name}": value for name, value in held_out.items()} | {"results": samples}
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _card(args: argparse.Namespace) -> int:
    from kda_jax.train.card import write_card

    _need(args, "model", "metrics")
    metrics = json.loads(args.metrics.read_text())
    quality, calibration = (None if f is None else json.loads(f.read_text()) for f in (args.quality, args.calibration))
    print(write_card(args.model, metrics, ModelConfig.from_file(args.model / "config.json"), quality, calibration))
    return 0
