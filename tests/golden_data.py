"""The golden files: a tiny checkpoint saved by transformers, and what transformers computed with it in fp32."""

import dataclasses
import functools
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "golden" / "kimi_linear_tiny"
LENGTHS = (1, 5, 63, 64, 65, 130)
NEW_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Golden:
    """``prompt`` int32 [T], ``logits`` fp32 [T, vocab] over it, ``greedy`` int32 [32] after it, ``gaps`` fp32 [32]."""

    prompt: np.ndarray
    logits: np.ndarray
    greedy: np.ndarray
    gaps: np.ndarray  # between the two largest logits at each greedy step


@functools.cache
def load_golden() -> dict[int, Golden]:
    """The golden data by prompt length."""
    with np.load(FOLDER.with_suffix(".npz")) as arrays:
        return {
            n: Golden(arrays[f"tokens_{n}"][:n], arrays[f"logits_{n}"], arrays[f"tokens_{n}"][n:], arrays[f"gaps_{n}"])
            for n in LENGTHS
        }


def pad_right(rows: list[np.ndarray], width: int | None = None, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens as int32 [B, width] and their lengths int32 [B]."""
    lengths = np.asarray([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), width or lengths.max()), fill, np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, lengths


def relative_rms(x, reference) -> float:
    """``rms(x - reference) / rms(reference)`` in fp64."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return float(np.sqrt(np.mean((x - reference) ** 2) / np.mean(reference**2)))
