"""Training checkpoints: the whole state in one safetensors file, so that a run resumes bit for bit.

This is not the model's file format (``kda_jax.checkpoint`` writes that): masters are fp32 and the optimiser's moments
travel along.
"""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

State = TypeVar("State")
FILE_NAME = "train_state.safetensors"


def save_state(state: Any, folder: str | Path, meta: dict[str, Any]) -> Path:
    """Write the arrays of ``state`` and the JSON-able ``meta``; an earlier file is replaced only once this is whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path, partial = folder / FILE_NAME, folder / (FILE_NAME + ".partial")
    leaves = jax.tree_util.tree_leaves_with_path(state)
    arrays = {jax.tree_util.keystr(key): np.asarray(jax.device_get(leaf), order="C") for key, leaf in leaves}
    save_file(arrays, partial, metadata={"meta": json.dumps(meta)})
    os.replace(partial, path)
    return path


def load_state(like: State, folder: str | Path) -> tuple[State, dict[str, Any]]:
    """``(state, meta)`` from ``folder``, shaped like ``like`` (arrays or ``jax.ShapeDtypeStruct``).

    Raises ``ValueError`` naming the file, and the tensor where one is missing or has another shape or dtype.
    """
    path = Path(folder) / FILE_NAME
    try:
        with safe_open(path, framework="numpy") as file:
            meta = json.loads(file.metadata()["meta"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a training checkpoint ({error})") from None
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    out = []
    for key, leaf in leaves:
        name = jax.tree_util.keystr(key)
        if name not in arrays:
            raise ValueError(f"{path}: tensor {name} is missing")
        array = arrays.pop(name)
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ValueError(
                f"{path}: tensor {name} is {array.dtype}{list(array.shape)}, "
                f"this run has {leaf.dtype}{list(leaf.shape)}"
            )
        out.append(jax.numpy.asarray(array))
    if arrays:
        raise ValueError(f"{path}: tensors this run does not have: {', '.join(sorted(arrays)[:3])}")
    return jax.tree_util.tree_unflatten(treedef, out), meta


def has_state(folder: str | Path) -> bool:
    return (Path(folder) / FILE_NAME).is_file()
