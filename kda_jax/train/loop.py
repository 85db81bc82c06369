"""A training run: data on the device, steps in compiled calls, evaluation, checkpoints, and a folder others load."""

import dataclasses
import datetime
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import model
from kda_jax.checkpoint import save
from kda_jax.checks import check_integer
from kda_jax.config import ModelConfig
from kda_jax.layers.params import ModelParams
from kda_jax.tokenizer import load_tokenizer
from kda_jax.train import checkpointing
from kda_jax.train.corpus import Split, read_corpus
from kda_jax.train.evaluate import held_out_loss
from kda_jax.train.progress import Progress
from kda_jax.train.step import DTYPES, Hyperparameters, TrainState, cast_params, init_state, run_steps


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """What a run needs besides its hyperparameters. Paths are folders; times are minutes of wall clock."""

    data: str | Path  # a prepared corpus
    output: str | Path  # gets model/ (an HF folder), metrics.json, log.txt
    config: ModelConfig
    hyper: Hyperparameters = dataclasses.field(default_factory=Hyperparameters)
    checkpoint: str | Path | None = None  # gets the training state; None: output/state
    max_minutes: float | None = None  # counted from the start, compilation included; the schedule ends with it
    steps_per_call: int = 20
    eval_every: int = 500  # steps
    checkpoint_every: int = 2000  # steps; 0: never (the state of the last step is then not kept either)
    seed: int = 0
    resume: bool = False
    stop_after: int | None = None  # stop at this step as if interrupted, schedule unchanged

    def __post_init__(self):
        check_integer("steps_per_call", self.steps_per_call, 1)
        check_integer("eval_every", self.eval_every, 1)
        check_integer("checkpoint_every", self.checkpoint_every, 0)
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"max_minutes must be above 0 or None, got {self.max_minutes!r}")
        if self.stop_after is not None:
            check_integer("stop_after", self.stop_after, 1)
        if self.resume and not self.checkpoint_every:
            raise ValueError("resume needs checkpoint_every above 0")

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.output) / "state" if self.checkpoint is None else Path(self.checkpoint)


def train(options: TrainOptions, *, forward: Callable[..., Any] = model.forward) -> dict[str, Any]:
    """Run (or resume) a training run and return its metrics, which ``output/metrics.json`` holds too.

    ``output/model`` always holds the weights with the least loss on the validation files so far, rounded to bf16, so a
    run that is killed leaves a model. The figures called ``held_out`` come from files that nothing in the run looked
    at. Without a time limit a run is reproducible, and resuming gives bit for bit what it would have given
    uninterrupted. ``forward`` is a function with the signature of ``kda_jax.model.forward``.

    Raises ``ValueError`` when the corpus does not fit the configuration, the checkpoint is of another run, or the loss
    stops being finite.
    """
    run = _Run(options, forward)
    with run.progress:
        return run.run()


class _Run:
    def __init__(self, options: TrainOptions, forward: Callable[..., Any]):
        self.started = time.monotonic()
        self.options, self.forward = options, forward
        self.output = Path(options.output)
        self.splits, self.manifest = read_corpus(options.data)
        _check_corpus(self.splits, self.manifest, options)
        self.state, self.meta = self._initial_state()
        self.progress = Progress(self.output / "log.txt", options.hyper.total_steps, append=options.resume)

    def _initial_state(self) -> tuple[TrainState, dict[str, Any]]:
        options = self.options
        fresh = init_state(options.config, options.hyper, options.seed)
        identity = {
            "config": json.loads(json.dumps(options.config.to_hf())),
            "hyper": dataclasses.asdict(options.hyper),
            "seed": options.seed,
            "corpus": self.manifest["sha256"],
        }
        meta = {"identity": identity, "history": [], "best": None, "elapsed": 0.0}
        if not options.resume:
            return fresh, meta
        state, stored = checkpointing.load_state(fresh, options.checkpoint_folder)
        for name, value in identity.items():
            if stored["identity"].get(name) != value:
                raise ValueError(f"resume: the checkpoint in {options.checkpoint_folder} has another {name}")
        return state, stored

    def elapsed(self) -> float:
        """Seconds of training so far, those before an interruption included."""
        return self.meta["elapsed"] + time.monotonic() - self.started

    def run(self) -> dict[str, Any]:
        options, hyper = self.options, self.options.hyper
        tokens = jnp.asarray(self.splits["train"].tokens)
        limit = None if options.max_minutes is None else 60 * options.max_minutes
        last = hyper.total_steps if options.stop_after is None else min(options.stop_after, hyper.total_steps)
        step = first = int(self.state.step)
        saved = step
        self.progress.line(
            f"{sum(x.size for x in jax.tree.leaves(self.state.params)):,} parameters; {len(tokens):,} training tokens; "
            f"{hyper.batch_size} x {hyper.seq_len} tokens a step; {jax.devices()[0].device_kind}; from step {step}"
        )
        warm_since, warm_step = None, step
        while step < last and (limit is None or step == first or self.elapsed() < limit):
            count = min(options.steps_per_call, last - step)
            share = 0.0 if limit is None else self.elapsed() / limit
            self.state, metrics = run_steps(
                self.state,
                tokens,
                jnp.float32(share),
                config=options.config,
                hyper=hyper,
                forward=self.forward,
                num_steps=count,
            )
            metrics = {name: np.asarray(value) for name, value in metrics.items()}
            step += count
            if not np.isfinite(metrics["loss"]).all():
                raise ValueError(f"training diverged: the loss is not finite at or before step {step}")
            now = time.monotonic()
            if warm_since is None:
                self.progress.line(f"first call of {count} steps, compilation included: {now - self.started:.1f} s")
                warm_since, warm_step = now, step
                rate = None
            else:
                rate = (step - warm_step) * hyper.batch_size * hyper.seq_len / (now - warm_since)
            done = max(step / hyper.total_steps, 0.0 if limit is None else self.elapsed() / limit)
            self.progress.step(step, metrics, done, rate)
            if step // options.eval_every > (step - count) // options.eval_every:
                before = time.monotonic()
                self.evaluate(step, metrics, rate)
                warm_since += time.monotonic() - before
            if options.checkpoint_every and step - saved >= options.checkpoint_every:
                before = time.monotonic()
                self.checkpoint()
                saved = step
                warm_since += time.monotonic() - before
        if step > first or not self.meta["history"]:
            if not self.meta["history"] or self.meta["history"][-1]["step"] != step:
                self.evaluate(step, metrics if step > first else None, None)
            if options.checkpoint_every and saved != step:
                self.checkpoint()
        return self.finish(step)

    def checkpoint(self) -> None:
        meta = self.meta | {"elapsed": self.elapsed()}
        checkpointing.save_state(self.state, self.options.checkpoint_folder, meta)

    def evaluate(self, step: int, metrics: dict[str, np.ndarray] | None, rate: float | None) -> None:
        """Look at the validation files; keep the weights if they are the best so far."""
        params = released_params(self.state.params)
        loss = self._loss(params, "validation")
        record = {
            "step": step,
            "seconds": round(self.elapsed(), 1),
            "train_nats_per_token": None if metrics is None else float(metrics["loss"].mean()),
            "imbalance": None if metrics is None else float(metrics["imbalance"].mean()),
            "validation_bits_per_byte": loss["bits_per_byte"],
            "validation_nats_per_token": loss["nats_per_token"],
            "tokens_per_second": rate,
        }
        self.meta["history"].append(record)
        best = self.meta["best"]
        improved = best is None or loss["bits_per_byte"] < best["validation_bits_per_byte"]
        if improved:
            held_out = self._loss(params, "held_out")
            best = {f"held_out_{name}": value for name, value in held_out.items()}
            best |= {"step": step, "validation_bits_per_byte": loss["bits_per_byte"]}
            self.meta["best"] = best
            tokenizer = load_tokenizer(Path(self.options.data))
            save((params, self.options.config), self.output / "model", tokenizer=tokenizer)
        self.progress.line(
            f"step {step}: validation {loss['bits_per_byte']:.4f} bits/byte ({loss['nats_per_token']:.4f} nats/token)"
            + (", the best so far, saved" if improved else "")
        )
        self._write_metrics(step)

    def _loss(self, params: ModelParams, split: str) -> dict[str, float]:
        hyper = self.options.hyper
        compute = cast_params(params, DTYPES[hyper.dtype])
        return held_out_loss(
            compute,
            self.options.config,
            self.splits[split],
            forward=self.forward,
            seq_len=hyper.seq_len,
            batch_size=min(64, hyper.batch_size),
        )

    def finish(self, step: int) -> dict[str, Any]:
        metrics = self._write_metrics(step)
        best = self.meta["best"]
        self.progress.line(
            f"done at step {step} after {self.elapsed() / 60:.1f} min; the model is step {best['step']}: "
            f"held out {best['held_out_bits_per_byte']:.4f} bits/byte"
        )
        return metrics

    def _write_metrics(self, step: int) -> dict[str, Any]:
        options, hyper = self.options, self.options.hyper
        per_step = hyper.batch_size * hyper.seq_len
        train_tokens = len(self.splits["train"].tokens)
        sizes = {name: {k: self.manifest[name][k] for k in ("files", "tokens", "bytes")} for name in self.splits}
        metrics = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": jax.devices()[0].device_kind,
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
            "parameters": sum(x.size for x in jax.tree.leaves(self.state.params)),
            "steps": step,
            "tokens_seen": step * per_step,
            "model_tokens_seen": self.meta["best"]["step"] * per_step,
            "epochs": self.meta["best"]["step"] * per_step / train_tokens,
            "minutes": self.elapsed() / 60,
            "evaluation_seq_len": hyper.seq_len,
            **self.meta["best"],
            "corpus": {k: self.manifest[k] for k in ("source", "licence", "sha256", "vocab_size")} | sizes,
            "seed": options.seed,
            "hyperparameters": dataclasses.asdict(hyper),
            "history": self.meta["history"],
        }
        metrics["model_step"] = metrics.pop("step")
        (self.output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        return metrics


def released_params(params: ModelParams) -> ModelParams:
    """The parameters as they are written: bf16, except the leaves that stay fp32."""
    return cast_params(params, jnp.bfloat16)


def _check_corpus(splits: dict[str, Split], manifest: dict[str, Any], options: TrainOptions) -> None:
    vocab = manifest.get("vocab_size")
    if vocab != options.config.vocab_size:
        raise ValueError(f"data: the corpus has a vocabulary of {vocab}, the model one of {options.config.vocab_size}")
    for name, split in splits.items():
        if len(split.tokens) <= options.hyper.seq_len:
            raise ValueError(
                f"data: {name} must have more than seq_len={options.hyper.seq_len} tokens, got {len(split.tokens)}"
            )
        if int(split.tokens.max()) >= options.config.vocab_size:
            raise ValueError(f"data: {name} has token {int(split.tokens.max())}, not below {options.config.vocab_size}")
