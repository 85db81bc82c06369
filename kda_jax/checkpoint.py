"""Hugging Face folders <-> parameters: ``load`` and ``save``."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.checks import check_integer
from kda_jax.config import DTYPES, ModelConfig
from kda_jax.hf_tensors import Piece, Spellings, canonical_name, choose_spelling, is_skipped, tensor_plan
from kda_jax.layers.params import ModelParams, abstract_params
from kda_jax.tensor_files import NUMPY_DTYPES, StoredTensor, TensorFolder, TensorSpec, write_tensor_folder
from kda_jax.tokenizer import Tokenizer, load_tokenizer

ASSETS = Path(__file__).parent / "assets"
MAX_SHARD_BYTES = 5_000_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded checkpoint. ``config.dtype`` is the dtype that ``params`` were loaded in."""

    config: ModelConfig
    params: ModelParams
    tokenizer: Tokenizer | None  # None: the folder has none
    stop_tokens: tuple[int, ...]  # token ids that end a text
    path: Path | None = None


def load(path: str | Path | None = None, *, dtype: Any = None, mesh: Any = None) -> Model:
    """Load a Hugging Face folder (``config.json``, safetensors weights, a tokenizer if it has one).

    ``path=None`` loads the model that ships with the package. ``dtype`` (bfloat16, float16 or float32, a name or a
    dtype) is what the weights are held in; None keeps the dtype that ``config.json`` names. ``A_log``, ``dt_bias``, the
    router weight and its correction bias are float32 whatever is stored and wanted. Tensors are read one at a time, so
    the host never holds much more than the result and one parameter. ``stop_tokens`` is the ``eos_token_id`` of
    ``generation_config.json``, else of ``config.json``.

    Raises ``ValueError`` naming the file, and the tensor where there is one: for a folder without weights, files that
    are missing, truncated or damaged, tensors that are missing, unexpected, of a wrong shape or of a dtype other than
    bfloat16, float16 and float32; and for a ``mesh``, since sharded loading is not implemented.
    """
    if mesh is not None:
        raise ValueError("mesh must be None: loading onto a mesh is not implemented")
    if path is None:
        if not (ASSETS / "config.json").is_file():
            raise ValueError("path=None means the model that ships with kda_jax, and this installation holds none")
        path = ASSETS
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"path must be a folder with a config.json and weights, got {str(path)!r}")
    config = ModelConfig.from_file(path / "config.json")
    if dtype is not None:
        config = dataclasses.replace(config, dtype=_dtype_name(dtype))
    stop_tokens = _stop_tokens(path, config)
    with TensorFolder(path) as folder:
        params = _read_params(folder, config)
    return Model(config, params, load_tokenizer(path), stop_tokens, path)


def save(
    model: Model | tuple[ModelParams, ModelConfig],
    path: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that ``load`` reads back bit for bit and that transformers' ``KimiLinearForCausalLM`` reads too.

    ``model`` is a ``Model`` or a pair ``(params, config)``. The weights are written in the dtype that they have (which
    ``config.json`` then names), float32 parameters in float32, under the names of the released Kimi-Linear files; as
    one file up to ``max_shard_bytes`` bytes, else in shards with an index. ``tokenizer`` defaults to the model's.
    The folder is made when it does not exist; an earlier checkpoint in it is replaced.

    Raises ``ValueError`` naming the parameter when ``params`` do not fit ``config``.
    """
    check_integer("max_shard_bytes", max_shard_bytes, 1)
    if isinstance(model, Model):
        params, config, stop_tokens = model.params, model.config, model.stop_tokens
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
    elif isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], ModelConfig):
        params, config = model
        stop_tokens = config.eos_token_ids
    else:
        raise ValueError(f"model must be a Model or a pair (params, config), got {type(model).__name__}")
    config = dataclasses.replace(config, dtype=_dtype_name(params.embed.dtype))
    _check_params(params, config)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)

    leaves = list(zip(jax.tree.leaves(tensor_plan(config)), jax.tree.leaves(params), strict=True))
    specs = [
        TensorSpec(piece.name, piece.shapes[0], np.dtype(leaf.dtype))
        for spellings, leaf in leaves
        for piece in spellings.options[0]
    ]

    def tensors() -> Iterator[np.ndarray]:
        for spellings, leaf in leaves:
            values = np.asarray(leaf)
            for piece in spellings.options[0]:
                yield (values if piece.index is None else values[piece.index]).reshape(piece.shapes[0])

    write_tensor_folder(path, specs, tensors(), max_shard_bytes)
    generation = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    generation["eos_token_id"] = stop_tokens[0] if len(stop_tokens) == 1 else list(stop_tokens) or None
    if tokenizer is not None:
        tokenizer.save(path)
    _write_json(path / "generation_config.json", generation)
    _write_json(path / "config.json", config.to_hf())


def _dtype_name(dtype: Any) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = dtype
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return name


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _stop_tokens(path: Path, config: ModelConfig) -> tuple[int, ...]:
    file = path / "generation_config.json"
    if not file.exists():
        return config.eos_token_ids
    try:
        eos = json.loads(file.read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: not a readable generation_config.json ({error})") from None
    if eos is None:
        return config.eos_token_ids
    tokens = tuple(eos) if isinstance(eos, list) else (eos,)
    for token in tokens:
        check_integer(f"{file}: eos_token_id", token, 0)
    return tokens


def _check_params(params: ModelParams, config: ModelConfig) -> None:
    wanted = abstract_params(config, config.dtype)
    if jax.tree.structure(params) != jax.tree.structure(wanted):
        raise ValueError("params do not have the structure of config: see kda_jax.layers.params.abstract_params")
    for (where, want), leaf in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(params), strict=True):
        if leaf.shape != want.shape or leaf.dtype != want.dtype:
            raise ValueError(
                f"params{jax.tree_util.keystr(where)} must be {want.dtype} {want.shape}, got {leaf.dtype} {leaf.shape}"
            )


def _read_params(folder: TensorFolder, config: ModelConfig) -> ModelParams:
    stored = _stored_by_canonical_name(folder, config.num_layers)
    plan, wanted = tensor_plan(config), abstract_params(config, config.dtype)
    unused = set(stored)
    chosen: list[tuple[Piece, ...]] = []
    for spellings in jax.tree.leaves(plan):
        pieces = _checked_pieces(folder, stored, spellings)
        chosen.append(pieces)
        unused.difference_update(canonical_name(piece.name) for piece in pieces)
    if unused:
        first = stored[min(unused)]
        others = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
        raise ValueError(f"{first.file}: unexpected tensor {first.name}{others}")
    leaves, structure = jax.tree.flatten(wanted)
    return jax.tree.unflatten(
        structure, [_read_leaf(folder, stored, p, leaf) for p, leaf in zip(chosen, leaves, strict=True)]
    )


def _stored_by_canonical_name(folder: TensorFolder, num_layers: int) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for name, tensor in folder.tensors.items():
        canonical = canonical_name(name)
        if is_skipped(canonical, num_layers):
            continue
        if canonical in stored:
            raise ValueError(f"{tensor.file}: {name} and {stored[canonical].name} are two spellings of one tensor")
        stored[canonical] = tensor
    return stored


def _checked_pieces(folder: TensorFolder, stored: dict[str, StoredTensor], spellings: Spellings) -> tuple[Piece, ...]:
    pieces, missing = choose_spelling(spellings, stored)
    if missing:
        raise ValueError(f"{folder.listing}: tensor {missing[0]} is missing")
    for piece in pieces:
        tensor = stored[canonical_name(piece.name)]
        if tensor.dtype not in NUMPY_DTYPES:
            raise ValueError(
                f"{tensor.file}: {tensor.name} must be stored as one of {', '.join(NUMPY_DTYPES)}, got {tensor.dtype}"
            )
        if tensor.shape not in piece.shapes:
            shapes = " or ".join(map(str, piece.shapes))
            raise ValueError(f"{tensor.file}: {tensor.name} must have shape {shapes}, got {tensor.shape}")
    return pieces


def _read_leaf(
    folder: TensorFolder, stored: dict[str, StoredTensor], pieces: tuple[Piece, ...], leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    values = np.empty(leaf.shape, leaf.dtype)
    for piece in pieces:
        tensor = stored[canonical_name(piece.name)]
        part = values if piece.index is None else values[piece.index]  # a view: indices are slices, or a first integer
        with np.errstate(over="ignore"):
            part[...] = folder.read(tensor.name, piece.source).reshape(part.shape)
        if leaf.dtype == np.float16 and NUMPY_DTYPES[tensor.dtype] != leaf.dtype and not np.isfinite(part).all():
            raise ValueError(f"{tensor.file}: {tensor.name} holds values past the range of float16")
    return jnp.asarray(values)
