"""What a run says while it works: a bar on a terminal, plain lines elsewhere, and the same lines in a file."""

import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

PLAIN_EVERY_SECONDS = 5.0


class Progress:
    """A context manager; ``line`` says one thing, ``step`` reports where training is."""

    def __init__(self, log: Path, total_steps: int, *, append: bool = False):
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("a" if append else "w")
        self._console = Console(highlight=False, soft_wrap=True)
        self._total = total_steps
        self._last = -float("inf")
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=1.0)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._log.close()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)
        self._write(text)

    def step(self, step: int, metrics: dict[str, np.ndarray], done: float, rate: float | None) -> None:
        """``metrics`` are those of the last call, ``done`` the share of the run, ``rate`` tokens per second."""
        text = (
            f"step {step}/{self._total} ({100 * min(done, 1.0):.1f} %)  loss {metrics['loss'].mean():.4f}  "
            f"lr {metrics['learning_rate'][-1]:.2e}  grad {metrics['grad_norm'].mean():.2f}  "
            f"load max/mean {metrics['imbalance'].mean():.2f}"
        )
        if rate is not None:
            text += f"  {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=min(done, 1.0), description=text)
        now = time.monotonic()
        if now - self._last >= PLAIN_EVERY_SECONDS:
            self._last = now
            self._write(text)
            if self._bar.disable:
                self._console.print(text, markup=False)

    def _write(self, text: str) -> None:
        self._log.write(text + "\n")
        self._log.flush()
