"""FqnConfig: which layer gets which scheme, by name, pattern or type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate as glob_to_regex
from typing import Any, Final

from torch import nn

from pyquant.core.presets import to_scheme
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError

DEFAULT: Final = "_default"
Key = str | type


@dataclass(frozen=True)
class Decision:
    """What a config says about one module: the scheme (None: leave alone), the key that said so, and how it matched."""

    scheme: QScheme | None
    key: Key
    kind: str  # 'name', 're', 'glob', 'type', 'default'


class FqnConfig:
    """Schemes by fully qualified name: a mapping {key: QScheme, its name, its preset, or None}.

    Keys, strongest first:
      'encoder.0.query'       exact name of a layer;
      're:blocks\\.\\d+\\.fc1'    regular expression, which must match the whole name;
      'encoder.*.query'       glob; * also crosses dots;
      nn.Linear               type: the closest base class of the layer wins;
      '_default'              every other layer; without it they are left alone.
    None leaves the layers of that key in floating point. Among equals the first in the mapping wins.

    Raises ArgumentError for a key or value of another kind, or a regular expression that does not compile.

    Example:
        >>> from pyquant.core.presets import W4A8Dynamic, W8A8Dynamic
        >>> config = FqnConfig({"re:.*fc1": W4A8Dynamic(), "head": None, "_default": W8A8Dynamic()})
        >>> str(config.decide("blocks.0.fc1", nn.Linear(2, 2)).scheme)
        'W4A8Dynamic(group_size=128)'
    """

    def __init__(self, entries: Mapping[Key, QScheme | None]) -> None:
        if not isinstance(entries, Mapping) or not entries:
            raise ArgumentError(
                "config", f"{type(entries).__name__} {entries!r}"[:120], "a mapping {name: QScheme or None}"
            )
        self.entries: dict[Key, Any] = {key: _scheme(key, value) for key, value in entries.items()}
        self._names: dict[str, QScheme | None] = {}
        self._patterns: dict[str, list[tuple[str, re.Pattern[str]]]] = {"re": [], "glob": []}
        self._types: list[type] = []
        for key, scheme in self.entries.items():
            if scheme is not None and not isinstance(scheme, QScheme):
                raise ArgumentError("config", f"{key!r}: {type(scheme).__name__} {scheme!r}"[:120], "a QScheme or None")
            self._add(key, scheme)

    def _add(self, key: Any, scheme: QScheme | None) -> None:
        if isinstance(key, type) and issubclass(key, nn.Module):
            self._types.append(key)
        elif not isinstance(key, str) or not key:
            raise ArgumentError("config", f"key {key!r}"[:120], "a name, a glob, 're:...', a module type or '_default'")
        elif key.startswith("re:"):
            try:
                self._patterns["re"].append((key, re.compile(key[3:])))
            except re.error as error:
                raise ArgumentError(
                    "config", f"key {key!r}: {error}"[:200], "a regular expression that compiles"
                ) from None
        elif any(sign in key for sign in "*?["):
            self._patterns["glob"].append((key, re.compile(glob_to_regex(key))))
        elif key != DEFAULT:
            self._names[key] = scheme

    def decide(self, name: str, module: nn.Module) -> Decision | None:
        """The decision for a module under one of its names; None where no key matches."""
        if name in self._names:
            return Decision(self._names[name], name, "name")
        for kind in ("re", "glob"):
            for key, pattern in self._patterns[kind]:
                if pattern.fullmatch(name):
                    return Decision(self.entries[key], key, kind)
        for base in type(module).__mro__:
            if base in self._types:
                return Decision(self.entries[base], base, "type")
        if DEFAULT in self.entries:
            return Decision(self.entries[DEFAULT], DEFAULT, "default")
        return None

    def matches(self, key: Key, name: str, module: nn.Module) -> bool:
        """Whether one key covers a module, also where a stronger key decides about it."""
        if isinstance(key, type):
            return isinstance(module, key)
        if key == DEFAULT or key in self._names:
            return key in (DEFAULT, name)
        return any(k == key and p.fullmatch(name) for patterns in self._patterns.values() for k, p in patterns)

    def check_used(self, layers: Iterable[tuple[str, nn.Module]], others: Iterable[tuple[str, nn.Module]]) -> None:
        """Raise ArgumentError naming every key that covers no layer: a silent typing error would leave floats behind.

        layers  the modules that can be converted; others   all further modules, to tell a key that hits the wrong kind.
        A key that leaves alone what is never converted (None for nn.LayerNorm) says what happens anyway and is fine.
        """
        layers, others = list(layers), list(others)
        unused = [
            key
            for key in self.entries
            if key != DEFAULT
            and not any(self.matches(key, name, module) for name, module in layers)
            and not (self.entries[key] is None and self._is_harmless(key, layers, others))
        ]
        if not unused:
            return
        told = []
        for key in unused:
            hit = next(((n, m) for n, m in others if self.matches(key, n, m)), None)
            text = repr(key) if isinstance(key, str) else key.__name__
            if hit is not None:
                text += f" (matches {hit[0]!r}, a {type(hit[1]).__name__}, which is not converted"
                text += f"; '{key}.*' means the layers inside)" if any(True for _ in hit[1].children()) else ")"
            told.append(text)
        names = ", ".join(name for name, _ in layers[:8]) + (", ..." if len(layers) > 8 else "")
        raise ArgumentError(
            "config", "no layer for " + "; ".join(told), f"keys that match a layer: {names or 'there is none'}"
        )

    def _is_harmless(self, key: Key, layers: list[tuple[str, nn.Module]], others: list[tuple[str, nn.Module]]) -> bool:
        hits = [name for name, module in others if self.matches(key, name, module)]
        return bool(hits) and not any(layer.startswith(f"{hit}.") for layer, _ in layers for hit in hits)

    def __repr__(self) -> str:
        return f"FqnConfig({self.entries!r})"


def _scheme(key: Key, value: object) -> object:
    try:
        return to_scheme(value)
    except ArgumentError as error:
        raise ArgumentError("config", f"{key!r}: {error.got}"[:160], error.allowed) from None
