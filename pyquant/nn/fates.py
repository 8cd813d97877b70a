"""What becomes of every layer: one list of fates, whether a config or rules say it, and what carries it out."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles, origin
from pyquant.nn.forms import has_form
from pyquant.nn.indivisible import fitted, overflow
from pyquant.nn.keep import Kept, remember
from pyquant.nn.linear_state import LinearState
from pyquant.nn.match import Decision, FqnConfig
from pyquant.nn.sites import Filter, Site
from pyquant.nn.swap import swap_modules
from pyquant.nn.undo import Undo

Swap = tuple[Sequence[str], nn.Module]  # all names of a module, and what takes its place
PATTERNS: Final = ("name", "re", "glob")
_RANK: Final = {kind: rank for rank, kind in enumerate((*PATTERNS, "type", "default"))}


@dataclass(frozen=True)
class LayerScheme:
    """A QScheme; the tensors ('weight', 'input', 'output') whose calibrator is open, which reads 'percentile' in it,
    and those whose ranges prepare_qat_ makes parameters, where they can be."""

    scheme: QScheme
    open: frozenset[str] = frozenset()
    learns: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Said:
    """What is asked for one layer. layer: None leaves it in floating point, `why` for a reader. kinds: how the keys
    match that decide ('name', 're', 'glob', 'type', 'default'); is_own: they mean the layer, not a block around it."""

    layer: LayerScheme | None = None
    kinds: frozenset[str] = frozenset()
    is_own: bool = True
    why: str = ""


@dataclass(frozen=True)
class Fate:
    """What becomes of one layer. layer: None leaves it in floating point; note: why, or why it has another scheme.
    is_wish: it stays because that was asked for; is_named: a key means it exactly."""

    site: Site
    layer: LayerScheme | None
    note: str = ""
    is_wish: bool = False
    is_named: bool = False

    def staying(self, why: str) -> Fate:
        """The same layer, left in floating point."""
        return replace(self, layer=None, note=why)


def fate_of(site: Site, said: Said, on_indivisible: str, kept: Mapping[int, Kept]) -> Fate:
    """The fate of a layer, which an obstacle leaves in floating point, with its reason.

    kept   kept_layers(). Raises ArgumentError where the layer is named exactly, where the obstacle can be taken away,
           and for a layer that can be rewritten.
    """
    fate = Fate(site, said.layer, said.why, said.layer is None, "name" in said.kinds)
    if said.layer is None:
        return fate
    obstacle = obstacles.why_not(site.module, site.parents)
    if obstacle is None and said.layer.scheme.is_integer:
        obstacle = obstacles.read_by(site.module, site.parents)
    if obstacle is not None:
        is_rewritable = has_form(site.module)
        if fate.is_named or not obstacle.is_final or is_rewritable:
            way = "rewrite it with pyquant.expose_linears_, or " if is_rewritable else ""
            raise ArgumentError("model", f"layer '{site.names[0]}' {obstacle.reason}", way + obstacle.remedy)
        return fate.staying(obstacle.reason)
    left = kept.get(id(site.module if site.owner is None else site.owner.module))
    if left is not None and not (said.is_own and said.kinds & set(PATTERNS if left.is_head else ("name",))):
        return fate.staying(left.reason)
    scheme, note = fitted(said.layer.scheme, site.module, on_indivisible, site.names[0])
    if scheme is not None and (reason := overflow(scheme, site.module)):
        if fate.is_named:
            raise ArgumentError("model", f"layer '{site.names[0]}': {reason}", "another scheme, or None in the config")
        return fate.staying(reason)
    return fate.staying(note) if scheme is None else replace(fate, layer=replace(said.layer, scheme=scheme), note=note)


def stays_without(fate: Fate, known: Container[str], why: str) -> Fate:
    """A static layer of a linear form stays, for that reason, where it is not known and nothing names it exactly."""
    is_static = fate.layer is not None and fate.layer.scheme.is_static
    if not is_static or fate.site.owner is None or fate.is_named or any(name in known for name in fate.site.names):
        return fate
    return fate.staying(f"{why} for {fate.site.names[0]}")


def twins_of(fates: Iterable[Fate], make: Callable[[Fate], nn.Module]) -> list[Swap]:
    """The new modules, by make(fate), of the layers that do not stay. Tied weights stay tied: quantised layers of one
    weight that are the same in scheme and numbers are one, but for those with hooks."""
    twins: list[Swap] = []
    tied: dict[tuple[type, int, int], list[nn.Module]] = {}
    for fate in (fate for fate in fates if fate.layer is not None):
        old, names = fate.site.module, fate.site.names
        new = noted(twin_of(old, names[0], lambda _, fate=fate: make(fate)), fate.note)  # type: ignore[misc]
        if isinstance(old, obstacles.KINDS) and not hasattr(old, "fake_quantizers"):
            origin.remember(new, old)
        if isinstance(new, LinearState) and not obstacles.has_hooks(old):
            known = tied.setdefault((type(old), id(old.weight), id(getattr(old, "bias", None))), [])
            same = next((twin for twin in known if is_same(twin, new)), None)
            known += [] if same else [new]
            new = same or new
        twins.append((names, new))
    return twins


def twin_of(old: nn.Module, name: str, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """make(old), a replacement that runs the old module's hooks; errors name the layer."""
    with errors_name(name):
        new = make(old)
    obstacles.carry_hooks(old, new)
    obstacles.carry_attributes(old, new)
    if isinstance(new, LinearState):
        obstacles.carry_frozen(old, new)
    if origin.has_origin(old):
        origin.remember(new, old)
    return new


@contextmanager
def errors_name(layer: str) -> Iterator[None]:
    """Within, an ArgumentError about a layer says which one."""
    try:
        yield
    except ArgumentError as error:
        raise type(error)(f"{layer}: {error.argument}", error.got, error.allowed) from None


def shares(one: nn.Module, other: nn.Module) -> bool:
    """Whether two layers of a kind have one weight and one bias."""
    same = (getattr(one, name, None) is getattr(other, name, None) for name in ("weight", "bias"))
    return type(one) is type(other) and all(same)


def is_same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two twins of one weight compute the same; repr() shows scheme and geometry."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=False)
    return repr(one) == repr(other) and all(_is_equal(*pair) for pair in pairs)


def _is_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return one.shape == other.shape and (one.is_meta or torch.equal(one, other))


def forms_of(fates: Iterable[Fate]) -> list[Swap]:
    """The linear forms that take the place of modules of which a layer does not stay."""
    owners = [fate.site.owner for fate in fates if fate.layer is not None and fate.site.owner is not None]
    return list({id(owner): (owner.names, owner.form) for owner in owners}.values())


def carry_out(
    model: nn.Module, fates: Sequence[Fate], twins: Sequence[Swap], undo: list[Undo], device: torch.device | None = None
) -> None:
    """Put linear forms and twins into a model, and remember why other layers stay. undo receives the steps back."""
    swap_modules(model, [*forms_of(fates), *twins], device=device, undo=undo)
    for fate in (fate for fate in fates if fate.layer is None):
        for left in (fate.site, fate.site.owner):
            if left is not None:
                remember(left.module, "" if fate.is_wish else fate.note, undo)


def wishes_of(fates: Iterable[Fate]) -> set[str]:
    """Names of layers, and of modules with linear forms, that stay as they were asked to."""
    return {left.names[0] for f in fates if f.is_wish for left in (f.site, f.site.owner) if left is not None}


def noted(new: nn.Module, note: str) -> nn.Module:
    """A new layer, with why it has another scheme than it was given ('': it has not)."""
    if note and hasattr(new, "note"):
        new.__dict__["note"] = note
    return new


def said_by(rules: FqnConfig, site: Site, filter_fn: Filter | None) -> Said:
    """What a config says about a layer. Raises ArgumentError where its names disagree."""
    decisions = _decisions(rules, site, filter_fn)
    scheme = decisions[0].scheme if decisions else None
    layer = None if scheme is None else LayerScheme(scheme)
    return Said(layer, frozenset(decision.kind for decision in decisions))


def _decisions(rules: FqnConfig, site: Site, filter_fn: Filter | None) -> list[Decision]:
    """What a config says about a module under all of its names, which must agree; empty: it does not mean it."""
    arguments.filter_function(filter_fn)
    selected = [name for name in site.names if filter_fn is None or filter_fn(site.module, name)]
    if not selected:
        return []
    decisions = [_decision(rules, name, site) for name in selected]
    schemes = [None if decision is None else decision.scheme for decision in decisions]
    said = [d for d in decisions if d is not None]
    if len(selected) == len(site.names) and all(scheme == schemes[0] for scheme in schemes):
        return said
    named = [d for d in said if d.kind != "default"]
    if len({d.scheme for d in named}) > 1 or len(selected) != len(site.names):
        got = ", ".join(f"{n}: {s}" for n, s in zip(selected, schemes, strict=True))
        allowed = "the same scheme for all its names"
        raise ArgumentError("config", f"one shared layer under several names ({got})", allowed)
    return named


def _decision(rules: FqnConfig, name: str, site: Site) -> Decision | None:
    """What a config says about a layer; for one in a linear form also what it says about the module as it was: by name
    or pattern where nothing as strong names the layer itself, by class before the class of the layer."""
    inner = rules.decide(name, site.module)
    if site.owner is None:
        return inner
    around = next(n for n in site.owner.names if name == n or not n or name.startswith(f"{n}."))
    outer = rules.decide(around, site.owner.module)
    if outer is None or outer.kind == "default":
        return inner or outer
    if inner is None or _RANK[outer.kind] < _RANK[inner.kind] or outer.kind == inner.kind == "type":
        return outer
    return inner
