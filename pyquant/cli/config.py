"""The configuration file of `pyquant quantize`: YAML, TOML or JSON -> what quantize_ takes.

default: W8A8Dynamic                      # every Linear that nothing below names; null leaves it alone
embeddings: true                          # int8 with a scale a row
layers:
  "encoder.*.dense": W4A8Dynamic(group_size=64)
  "re:.*classifier": null
  "head": {scheme: W4A16, group_size: 32}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyquant.core.names import did_you_mean
from pyquant.core.presets import scheme_from_name
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.recipe import documents
from pyquant.recipe.fields import shown

_KEYS = ("default", "embeddings", "layers")


@dataclass(frozen=True)
class QuantizeConfig:
    """schemes: the mapping of FqnConfig ('_default' for the rest). embeddings: also quantise Embedding layers."""

    schemes: dict[str | type, QScheme | None]
    embeddings: bool = False


def read_config(path: str | Path) -> QuantizeConfig:
    """The configuration in a .json, .yaml, .yml or .toml file; unknown keys are errors.

    Raises ArgumentError naming the file and what is wrong in it.
    """
    return parse_config(documents.read(Path(path), "--config"), str(path))


def parse_config(data: object, where: str) -> QuantizeConfig:
    """The configuration in plain data. Raises ArgumentError naming `where`."""
    if not isinstance(data, Mapping):
        raise ArgumentError(
            "--config", f"{where}: a {type(data).__name__}", f"a mapping with the keys {', '.join(_KEYS)}"
        )
    for key in data:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS)
            raise ArgumentError("--config", f"{where}: unknown key {key!r}"[:160], ", ".join(_KEYS) + hint)
    layers = data.get("layers") or {}
    if not isinstance(layers, Mapping):
        raise ArgumentError("--config", f"{where}: layers is a {type(layers).__name__}", "a mapping {pattern: scheme}")
    embeddings = data.get("embeddings", False)
    if not isinstance(embeddings, bool):
        raise ArgumentError("--config", f"{where}: embeddings is {shown(embeddings)}"[:160], "true or false")
    schemes: dict[str | type, QScheme | None] = {
        str(pattern): _scheme(value, f"{where}: layers: {pattern!r}") for pattern, value in layers.items()
    }
    if data.get("default") is not None:
        schemes["_default"] = _scheme(data["default"], f"{where}: default")
    if not any(scheme is not None for scheme in schemes.values()):
        raise ArgumentError("--config", f"{where}: no scheme", "a default, or a scheme for at least one layer")
    return QuantizeConfig(schemes, embeddings)


def _scheme(value: object, where: str) -> QScheme | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        options = {str(k): v for k, v in value.items() if k != "scheme"}
        arguments = ", ".join(f"{k}={v if isinstance(v, str) else shown(v)}" for k, v in options.items())
        value = f"{value.get('scheme')}({arguments})"
    if not isinstance(value, str):
        raise ArgumentError("--config", f"{where}: {shown(value)}"[:160], "a preset such as W8A8Dynamic, or null")
    try:
        return scheme_from_name(value)
    except ArgumentError as error:
        raise ArgumentError("--config", f"{where}: {error.got}"[:200], error.allowed) from None
