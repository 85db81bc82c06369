"""Model configurations and run presets by name: those in ``configs/``, in a source checkout and in an installation."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kda_jax.config import ModelConfig
from kda_jax.options import GenerateOptions, SpeculativeOptions


@dataclasses.dataclass(frozen=True)
class Preset:
    """How to run: what ``configs/presets/NAME.json`` holds."""

    generate: GenerateOptions
    speculative: SpeculativeOptions | None = None


def configs_folder() -> Path:
    """The folder of configurations: inside the package when installed, else the checkout's ``configs``."""
    package = Path(__file__).parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "presets").is_dir():
            return folder
    raise ValueError(f"this installation of kda_jax holds no configs folder (looked in {package})")


def config_names() -> list[str]:
    """Names of the model configurations that ``find_config`` knows."""
    return sorted(file.parent.name for file in configs_folder().glob("*/config.json"))


def preset_names() -> list[str]:
    """Names of the run presets that ``load_preset`` knows."""
    return sorted(file.stem for file in (configs_folder() / "presets").glob("*.json"))


def find_config(name: str | Path) -> Path:
    """The ``config.json`` that ``name`` means: a folder that has one, such a file itself, or a name in ``configs/``.

    Raises ``ValueError`` that lists the known names.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    if str(name) in config_names():
        return configs_folder() / name / "config.json"
    reason = "it holds no config.json" if path.is_dir() else "no such folder or file"
    raise ValueError(
        f"configuration must be a folder with a config.json or one of {', '.join(config_names())}, "
        f"got {str(name)!r} ({reason})"
    )


def load_config(name: str | Path) -> ModelConfig:
    """The configuration that ``find_config(name)`` finds."""
    return ModelConfig.from_file(find_config(name))


def load_preset(name: str) -> Preset:
    """The run preset ``name``. Raises ``ValueError`` that lists the known names, or names a key that is wrong."""
    if name not in preset_names():
        raise ValueError(f"preset must be one of {', '.join(preset_names())}, got {name!r}")
    file = configs_folder() / "presets" / f"{name}.json"
    raw = json.loads(file.read_text())
    unknown = set(raw) - {"generate", "speculative"}
    if unknown or "generate" not in raw:
        raise ValueError(f"{file}: must hold 'generate' and may hold 'speculative', got {', '.join(sorted(raw))}")
    speculative = raw.get("speculative")
    return Preset(
        generate=_options(GenerateOptions, raw["generate"], file, "generate"),
        speculative=None if speculative is None else _options(SpeculativeOptions, speculative, file, "speculative"),
    )


def _options(kind: Any, values: Mapping[str, Any], file: Path, key: str) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            raise ValueError(f"{file}: {key}.{name} is not a field of {kind.__name__}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{file}: {key}: {error}") from None
