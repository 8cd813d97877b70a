"""The rules of a SelectiveQuantizer for layers and blocks, and which one applies at one place of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import nn

from pyquant.core.names import did_you_mean
from pyquant.errors import ArgumentError
from pyquant.nn.fates import LayerScheme
from pyquant.nn.match import DEFAULT, FqnConfig, Key
from pyquant.nn.refusals import QUANTISED, already_quantised
from pyquant.ptq.mapping import QuantizedMetadata

# Name before type; among equals the innermost module that is named, then the rule that was registered first.
_RANK: Final = {"name": 0, "re": 1, "glob": 2, "type": 3}

Chain = Sequence[tuple[str, nn.Module]]  # (name, module) from the model's child down to the place itself


@dataclass(frozen=True)
class Rule:
    """One registered key. what: None (skip), a LayerScheme, or a QuantizedMetadata. source: the call or section of a
    recipe that the key stands in, for messages."""

    key: Key
    what: LayerScheme | QuantizedMetadata | None
    matcher: FqnConfig
    source: str

    @staticmethod
    def of(key: object, what: LayerScheme | QuantizedMetadata | None, source: str) -> Rule:
        """Raises ArgumentError for a key that is no name, glob, 're:...' or module class."""
        if key == DEFAULT:
            raise ArgumentError(source, repr(key), "names of layers; the default is the quantizer's scheme")
        matcher = FqnConfig({key: None})  # type: ignore[dict-item]
        return Rule(next(iter(matcher.entries)), what, matcher, source)

    def of_model(self, model: nn.Module) -> Rule:
        """The rule where a key that is a module's exact name means that module."""
        return replace(self, matcher=self.matcher.of_model(model))

    def kind_at(self, name: str, module: nn.Module) -> str | None:
        """How the key names a module: 'name', 're', 'glob', 'type', or None."""
        decision = self.matcher.decide(name, module)
        return None if decision is None else decision.kind

    def covers(self, place: nn.Module, depth: int) -> bool:
        """Whether the rule, matched `depth` modules above a place, is meant for it: skips and schemes hold for all
        inside, a mapping for blocks of its float source or, without one, for the module itself."""
        if not isinstance(self.what, QuantizedMetadata):
            return True
        source = self.what.float_source
        return depth == 0 if source is None else type(place) is source


@dataclass(frozen=True)
class LayerDecision:
    """what: None (floating point, or nothing said), LayerScheme, QuantizedMetadata. kind, key: the rule used.
    is_own: the key means the place itself, not a block around it."""

    what: LayerScheme | QuantizedMetadata | None
    kind: str
    key: object
    is_own: bool = False


def chains_of(model: nn.Module, forms: Mapping[int, nn.Module]) -> dict[int, list[Chain]]:
    """For every module, under each of its names, the modules from the model down to it. A chain through a linear
    form ({id of a module: its form}) has the module and the form, which stands last."""
    chains: dict[int, list[Chain]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if not name:
            continue
        above = [(prefix, modules[prefix]) for prefix in prefixes(name)]
        chains.setdefault(id(module), []).append(above)
        parts = {} if id(module) not in forms else dict(forms[id(module)].named_modules(remove_duplicate=False))
        for inner, part in parts.items():
            within = [(f"{name}.{prefix}", parts[prefix]) for prefix in prefixes(inner)]
            chains.setdefault(id(part), []).append([*above, (name, parts[""]), *within])
    return chains


def prefixes(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def strongest(rules: Iterable[Rule], chain: Chain) -> tuple[Rule, str] | None:
    """The rule that wins at the end of a chain, and how it matched; None where no rule is meant for it."""
    place = chain[-1][1]
    best: tuple[tuple[int, int, int], Rule, str] | None = None
    for order, rule in enumerate(rules):
        for depth, (name, module) in enumerate(reversed(chain)):
            kind = rule.kind_at(name, module)
            if kind is None or not rule.covers(place, depth):
                continue
            weight = (_RANK[kind], depth, order)
            if best is None or weight < best[0]:
                best = (weight, rule, kind)
    return None if best is None else best[1:]


def check_used(
    rules: Iterable[Rule], model: nn.Module, leaves: tuple[type[nn.Module], ...], forms: Mapping[int, nn.Module]
) -> None:
    """Raise ArgumentError naming every key that does nothing in a model, the layers of linear forms included: a
    typing error must not go unseen."""
    found = list(model.named_modules(remove_duplicate=False))
    modules = [(name, module) for name, module in found if name]
    for name, module in found:
        if id(module) in forms:
            modules += [(f"{name}.{inner}" if inner else name, m) for inner, m in forms[id(module)].named_modules()]
    useless: dict[str, str] = {}  # what is wrong with a key -> where it stands
    done = False
    for rule in rules:
        hits = [(name, module) for name, module in modules if rule.kind_at(name, module)]
        text = repr(rule.key) if isinstance(rule.key, str) else rule.key.__name__
        if not hits:
            hint = did_you_mean(rule.key, [name for name, _ in modules]) if isinstance(rule.key, str) else ""
            useless[f"{text} (no such module{hint})"] = rule.source
        elif isinstance(rule.what, QuantizedMetadata):
            source = rule.what.float_source
            classes = (source, rule.what.quantized_target_class)  # which a second quantize_module finds there
            if source is not None and not any(type(m) in classes for _, hit in hits for m in hit.modules()):
                useless[f"{text} (no {source.__name__} in it)"] = rule.source
        elif rule.what is not None and not any(
            isinstance(m, leaves) or id(m) in forms for _, hit in hits for m in hit.modules()
        ):
            useless[f"{text} (no layer that is quantised in it)"] = rule.source
            done |= any(isinstance(m, QUANTISED) for _, hit in hits for m in hit.modules())
    if done:
        raise already_quantised(model)
    if useless:
        names = [name for name, module in modules if isinstance(module, leaves)]
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        places = ", ".join(dict.fromkeys(useless.values()))
        raise ArgumentError(places, "; ".join(useless), f"keys that match: {shown or 'there is no layer'}")
