"""FqnConfig: which layer gets which scheme, by name, pattern or type."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from pyquant.core import arguments
from pyquant.core.names import did_you_mean
from pyquant.core.patterns import MAX_EXPRESSIONS, Expression, Globs
from pyquant.core.presets import to_scheme
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError

DEFAULT: Final = "_default"
_TOLD: Final = 12  # keys without a layer that an error names
Key = str | type


@dataclass(frozen=True)
class Decision:
    """What a config says about one module: the scheme (None: leave alone), the key that decided, and how it matched."""

    scheme: QScheme | None
    key: Key
    kind: str  # 'name', 're', 'glob', 'type', 'default'


class FqnConfig:
    """Schemes by fully qualified name: a mapping {key: QScheme, its name, its preset, or None}.

    Keys, strongest first:
      'encoder.0.query'       exact name of a layer;
      're:blocks\\.\\d+\\.fc1'    regular expression, which must match the whole name (no backreferences: the time of a
                              match is bounded, pyquant/core/patterns.py);
      'encoder.*.query'       glob; * also crosses dots; a name of the model that holds * ? or [ is that name
                              (of_model);
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
            got = f"{type(entries).__name__} {entries!r}"[:120]
            raise ArgumentError("config", got, "a mapping {name: QScheme or None}")
        self.entries: dict[Key, Any] = {key: _scheme(key, value) for key, value in entries.items()}
        self._names: dict[str, QScheme | None] = {}
        self._expressions: dict[str, Expression] = {}
        self._types: list[type] = []
        self._found: dict[str, list[tuple[str, str]]] = {}  # name -> keys that match it: each is asked several times
        globs: list[str] = []
        for key, scheme in self.entries.items():
            if scheme is not None and not isinstance(scheme, QScheme):
                raise ArgumentError("config", f"{key!r}: {type(scheme).__name__} {scheme!r}"[:120], "a QScheme or None")
            self._add(key, scheme, globs)
        self._globs, self._glob_keys = Globs(globs), globs

    def of_model(self, model: nn.Module) -> FqnConfig:
        """The same rules where a key that is a module's exact name means that module, also where it reads like a glob
        ('h[0]', which as a glob matches 'h0'). Raises ArgumentError for what is no module."""
        arguments.module("model", model)
        if not self._glob_keys:
            return self
        names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        exact = [key for key in self._glob_keys if key in names]
        if not exact:
            return self
        new = copy.copy(self)
        new._names = self._names | {key: self.entries[key] for key in exact}
        new._glob_keys = [key for key in self._glob_keys if key not in exact]
        new._globs, new._found = Globs(new._glob_keys), {}
        return new

    def _add(self, key: Any, scheme: QScheme | None, globs: list[str]) -> None:
        if isinstance(key, type) and issubclass(key, nn.Module):
            self._types.append(key)
        elif not isinstance(key, str) or not key:
            raise ArgumentError("config", f"key {key!r}"[:120], "a name, a glob, 're:...', a module type or '_default'")
        elif key.startswith("re:"):
            if len(self._expressions) >= MAX_EXPRESSIONS:
                raise ArgumentError("config", f"more than {MAX_EXPRESSIONS} expressions 're:...'", "fewer of them")
            self._expressions[key] = Expression(key[3:])
        elif any(sign in key for sign in "*?["):
            globs.append(key)
        elif key != DEFAULT:
            self._names[key] = scheme

    def decide(self, name: str, module: nn.Module) -> Decision | None:
        """The decision for a module under one of its names; None where no key matches."""
        arguments.text("name", name)
        if name in self._names:
            return Decision(self._names[name], name, "name")
        for key, kind in self._matching(name):
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
        arguments.text("key", key)
        arguments.text("name", name)
        if key == DEFAULT or key in self._names:
            return key in (DEFAULT, name)
        return any(found == key for found, _ in self._matching(name))

    def _matching(self, name: str) -> list[tuple[str, str]]:
        """The patterns that match a name and their kinds, strongest first."""
        patterns = self._found.get(name)
        if patterns is None:
            patterns = [(key, "re") for key, expression in self._expressions.items() if expression.matches(name)]
            patterns += [(key, "glob") for key in self._globs.matching(name)]
            self._found[name] = patterns
        return patterns

    def _covered(self, modules: Iterable[tuple[str, nn.Module]]) -> dict[Key, list[tuple[str, nn.Module]]]:
        """Key -> the modules that it covers."""
        covered: dict[Key, list[tuple[str, nn.Module]]] = {}
        for name, module in modules:
            keys: list[Key] = [key for key, _ in self._matching(name)]
            keys += [name] if name in self._names else []
            keys += [kind for kind in self._types if isinstance(module, kind)]
            for key in keys:
                covered.setdefault(key, []).append((name, module))
        return covered

    def check_used(self, layers: Iterable[tuple[str, nn.Module]], others: Iterable[tuple[str, nn.Module]]) -> None:
        """Raise ArgumentError naming every key that covers no layer: a silent typing error would leave floats behind.

        layers  the modules that can be converted; others   all further modules, to tell a key that hits the wrong kind.
        A key that leaves alone what is never converted (None for nn.LayerNorm) says what happens anyway and is fine.
        """
        layers, others = _named("layers", layers), _named("others", others)
        used, hits = self._covered(layers), self._covered(others)
        unused = [
            key
            for key, value in self.entries.items()
            if key != DEFAULT and key not in used and not (value is None and _is_harmless(hits.get(key, []), layers))
        ]
        if not unused:
            return
        known = [name for name, _ in layers]
        problems = [_problem(key, hits.get(key, []), known) for key in unused[:_TOLD]]
        problems += [f"{len(unused) - _TOLD} more"] if len(unused) > _TOLD else []
        names = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        allowed = f"keys that match a layer: {names or 'there is none'}"
        raise ArgumentError("config", "no layer for " + "; ".join(problems), allowed)

    def __repr__(self) -> str:
        return f"FqnConfig({self.entries!r})"


def _scheme(key: Key, value: object) -> object:
    try:
        return to_scheme(value)
    except ArgumentError as error:
        raise ArgumentError("config", f"{key!r}: {error.got}"[:160], error.allowed) from None


def _problem(key: Key, hits: list[tuple[str, nn.Module]], known: list[str]) -> str:
    """A key that covers no layer, with what it covers instead or what it may have been meant for."""
    text = repr(key[:120]) if isinstance(key, str) else key.__name__
    if not hits:
        return text + (did_you_mean(key, known) if isinstance(key, str) else "")
    name, module = hits[0]
    inside = f"; '{key!s:.120}.*' means the layers inside" if any(True for _ in module.children()) else ""
    return f"{text} (matches {name!r}, a {type(module).__name__}, which is not converted{inside})"


def _is_harmless(hits: list[tuple[str, nn.Module]], layers: list[tuple[str, nn.Module]]) -> bool:
    return bool(hits) and not any(layer.startswith(f"{hit}.") for layer, _ in layers for hit, _ in hits)


def _named(argument: str, modules: Any) -> list[tuple[str, nn.Module]]:
    """Pairs (name, module), as named_modules gives them. Raises ArgumentError."""
    pairs = list(arguments.iterable(argument, modules, "pairs (name, module)"))
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], nn.Module):
            raise ArgumentError(argument, arguments.shown(pair), "pairs (name, module)")
    return pairs
