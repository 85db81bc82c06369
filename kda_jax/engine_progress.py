"""The bar that a long run of the engine shows."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def progress(engine: Any, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar of finished requests on the terminal, or nothing; yields what to call after a step."""
    if not shown:
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn()) as bar:
        total = engine.unfinished
        task = bar.add_task("", total=total)

        def update():
            stats = engine.stats
            text = f"{stats.generated:,} tokens, {stats.steps:,} steps, {stats.preemptions} preempted"
            bar.update(task, completed=total - engine.unfinished, description=text)

        yield update
