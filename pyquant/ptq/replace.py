"""One run of SelectiveQuantizer over a model: blocks first, then every layer, and back to the start where one fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Final

from torch import nn

from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.nn.convert import Prepare, prepared
from pyquant.nn.fates import Fate, LayerScheme, Said, carry_out, fate_of, stays_without, twins_of, wishes_of
from pyquant.nn.forms import has_form
from pyquant.nn.keep import Kept, kept_layers
from pyquant.nn.parents import has_quantised
from pyquant.nn.refusals import already_quantised, check_not_double, is_wholly_quantised
from pyquant.nn.report import quantization_report
from pyquant.nn.sites import Owner, Site, check_names, find_all_sites, find_owners
from pyquant.nn.swap import distinct, swap_modules
from pyquant.nn.tell import warn_of_floats
from pyquant.nn.undo import Undo, undone_on_error
from pyquant.ptq.layer_scheme import with_descriptors
from pyquant.ptq.mapping import QuantizedMapping, QuantizedMetadata, ReplacementAction, Wrapper
from pyquant.ptq.rules import Chain, LayerDecision, Rule, chains_of, check_used, prefixes, strongest
from pyquant.recipe.recipe import EVERYTHING
from pyquant.simulate.insert import replace_simulating, simulated
from pyquant.simulate.kinds import SIMULATED, is_simulated

_NOT_KEPT: Final = Kept("")


@dataclass(frozen=True)
class Outcome:
    """The result for one layer or block: name, class before, and the scheme or what else happened."""

    name: str
    kind: str
    what: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): {self.what}" + (f", {self.why}" if self.why else "")


@dataclass(frozen=True)
class Like:
    """What a recipe does as quantize_ does, and SelectiveQuantizer alone does not: classes with a linear form are
    exposed, and everything without an integer twin that is not named stays. ranges: names of the tensors that have
    one already, where no data will find any; None: not so."""

    embeddings: bool = False
    heads: bool | str | None = EVERYTHING
    ranges: frozenset[str] | None = None


@dataclass
class Replacement:
    """The walk over one model. rules: registered keys. mappings: classes with a counterpart, for this quantizer.
    prepare: makes quantised layers at once, where nothing is to be simulated."""

    model: nn.Module
    default: LayerScheme | None
    rules: Sequence[Rule]
    mappings: Mapping[type[nn.Module], QuantizedMetadata]
    left_alone: tuple[type[nn.Module], ...] = ()
    on_indivisible: str = "per_channel"
    like: Like | None = None
    prepare: Prepare | None = None

    def __post_init__(self) -> None:
        self.leaves: tuple[type[nn.Module], ...] = tuple(SIMULATED)
        if self.like is not None and self.like.embeddings:
            self.leaves += (nn.Embedding,)
        self.lookups: list[Fate] = []  # to become QEmbedding when all else is converted
        self.made: dict[int, nn.Module] = {}
        self.undo: list[Undo] = []
        self.outcomes: list[Outcome] = []
        self.kept: dict[int, Kept] = {}
        self.mapped: set[int] = set()  # modules that a counterpart is being made of
        self.closed: set[int] = set()  # modules in which nothing is looked at
        self.defaults: dict[int, LayerScheme | None] = {}  # id of a block -> the scheme of what is in it
        self.later: list[tuple[nn.Module, QuantizedMetadata, LayerScheme | None, str]] = []  # made of quantised blocks
        self.done: dict[int, tuple[nn.Module, nn.Module]] = {}  # id -> (old, kept alive; new)

    def run(self, skip_last: int) -> list[Outcome]:
        """Replace everything. -> one Outcome a layer. On any exception the model is as before."""
        model, kinds = self.model, tuple(SIMULATED)
        if not isinstance(model, nn.Module) or isinstance(model, kinds) or is_simulated(model):
            raise ArgumentError("model", type(model).__name__, "a torch.nn.Module that contains float layers")
        if is_wholly_quantised(model, kinds):
            raise already_quantised(model)
        check_names(name for name, module in model.named_modules() if isinstance(module, kinds))
        owners = self._look()
        check_used(self.rules, model, self.leaves, self.forms)
        with undone_on_error(self.undo):
            if any(is_simulated(module) for module in model.modules()):
                replace_simulating(model, methodcaller("to_float"), self.undo)
                owners = self._look()
            if self._has_blocks():
                before = self.chains
                self._visit_children(model, (), self.default)
                owners = self._look()
                self.chains |= before  # rules mean layers as they stood
            blocks = {outcome.name for outcome in self.outcomes}
            fates = self._fates(owners, skip_last)
            self.lookups = [f for f in fates if f.layer is not None and isinstance(f.site.module, nn.Embedding)]
            layers = [fate for fate in fates if not isinstance(fate.site.module, nn.Embedding)]
            self.made = {} if self.prepare is None else prepared(self.prepare, model, fates)
            for fate in (fate for fate in fates if id(fate.site.module) in self.made):
                self.made[id(fate.site.module)].train(fate.site.module.training)
            carry_out(
                model, fates, twins_of(layers, lambda f: self.made.get(id(f.site.module)) or simulated(f)), self.undo
            )
            self._tell_all(fates)
            self._make_blocks()
            self._warn_of_floats(blocks | wishes_of(fates))
            if not self.lookups and not has_quantised(model):
                check_not_double(model, [fate.site.module for fate in fates if not fate.is_wish])
                got = f"a {type(model).__name__} of which no layer would be quantised"
                raise ArgumentError("model", got, "a model with nn.Linear, and rules that leave some of it to quantise")
        return self.outcomes

    def fates(self, skip_last: int) -> list[Fate]:
        """What becomes of every layer; the model stays as it is, and may be on the meta device.

        Raises UnsupportedError for a model with blocks that are replaced, whose layers are known only then.
        """
        owners = self._look()
        check_used(self.rules, self.model, self.leaves, self.forms)
        if self._has_blocks():
            raise UnsupportedError("blocks that are replaced, of which the layers are asked for before; allowed: run()")
        return self._fates(owners, skip_last)

    def _look(self) -> list[Owner]:
        """The modules with a linear form; what stands above every module."""
        owners = [] if self.like is None or has_form(self.model) else find_owners(self.model)
        self.forms = {id(owner.module): owner.form for owner in owners}
        self.chains = chains_of(self.model, self.forms)
        return owners

    # ---- layers

    def _fates(self, owners: Sequence[Owner], skip_last: int) -> list[Fate]:
        if self.like is not None and self.like.heads != EVERYTHING:
            self.kept = kept_layers(self.model, heads=self.like.heads is True)
        last = _last_layers(self.model, skip_last)
        sites = find_all_sites(self.model, self.leaves, owners)
        fates = [
            fate_of(site, self._said(site, last), self.on_indivisible, self.kept)
            for site in sites
            if id((site.owner or site).module) not in self.closed
        ]
        if self.like is None or self.like.ranges is None:
            return fates
        known = {name.removesuffix(".input") for name in self.like.ranges}
        return [stays_without(fate, known, "no range is given") for fate in fates]

    def _said(self, site: Site, last: set[nn.Module]) -> Said:
        """What the rules say about one layer."""
        decision = self._decide(site.module, self.chains[id(site.module)])
        if decision.kind == "default" and site.module in last:
            return Said(why="one of the last layers")
        if decision.what is None and decision.kind != "default":
            return Said(why=f"skipped by {decision.key}")
        if decision.kind == "default" and isinstance(site.module, self.left_alone):
            return Said(why="left alone by the recipe")
        layer = decision.what if isinstance(decision.what, LayerScheme) else self._default_of(site)
        if layer is None:
            return Said(why="named by no rule")
        return Said(layer, frozenset((decision.kind,)), decision.is_own)

    def _default_of(self, site: Site) -> LayerScheme | None:
        """The scheme of what no rule names: of the innermost mapped block around a layer, or that of the model."""
        modules = dict(self.model.named_modules(remove_duplicate=False)) if self.defaults else {}
        above = [id(modules.get(name)) for name in prefixes(site.names[0])]
        found = [self.defaults[block] for block in above if block in self.defaults]
        return found[-1] if found else self.default

    def _tell_all(self, fates: Sequence[Fate]) -> None:
        """An Outcome for every layer, and one for a module with a linear form that stays as it is."""
        changed = {id(fate.site.owner) for fate in fates if fate.layer is not None}
        told: dict[str, Outcome] = {}
        for fate in fates:
            owner, layer, what, why = fate.site.owner, fate.layer, "floating point", fate.note
            holder = fate.site if owner is None or id(owner) in changed else owner
            if layer is not None:
                what = "int8 rows" if isinstance(holder.module, nn.Embedding) else str(layer.scheme)
                waits = f"its {' and '.join(sorted(layer.open))} by the method of the calibration" if layer.open else ""
                why = "; ".join(part for part in (why, waits) if part)
            told[holder.names[0]] = Outcome(holder.names[0], type(holder.module).__name__, what, why)
        self.outcomes += told.values()

    def _warn_of_floats(self, wished: set[str]) -> None:
        """What no rule of any kind could reach: classes that multiply by matrices of their own, and layers with one
        that no rule left alone."""
        skips = [rule for rule in self.rules if rule.what is None]
        for name, module in self.model.named_modules():
            is_skipped = any(strongest(skips, chain) is not None for chain in self.chains.get(id(module), []))
            is_head = self.kept.get(id(module), _NOT_KEPT).is_head
            is_float_head = is_head and self.like is not None and self.like.heads is False
            if is_skipped or is_float_head or self.default is None or isinstance(module, nn.Embedding):
                wished.add(name)
        warn_of_floats(quantization_report(self.model), wished, "SelectiveQuantizer", stacklevel=6)

    # ---- blocks

    def _has_blocks(self) -> bool:
        is_mapped = any(isinstance(rule.what, QuantizedMetadata) for rule in self.rules)
        return is_mapped or any(isinstance(m, Wrapper) or type(m) in self.mappings for m in self.model.modules())

    def _visit_children(self, parent: nn.Module, above: Chain, default: LayerScheme | None) -> None:
        for child_name, child in list(parent._modules.items()):
            if child is None:
                continue
            name = f"{above[-1][0]}.{child_name}" if above else child_name
            new = self._visit(child, [*above, (name, child)], default)
            if new is not child:
                # a change at a time: what fails later is taken back with the rest
                swap_modules(parent, [([child_name], new)], undo=self.undo)

    def _visit(self, module: nn.Module, chain: Chain, default: LayerScheme | None) -> nn.Module:
        """What takes the place of a module (itself: nothing) before the layers in it are looked at."""
        if id(module) in self.done:  # a module with several names has one fate
            return self.done[id(module)][1]
        what = self._decide(module, self.chains.get(id(module), [chain])).what
        if isinstance(what, QuantizedMetadata) and id(module) not in self.mapped:
            new = self._mapped(module, chain, what, default)
        elif isinstance(module, Wrapper):  # a skip by name, or SkipQuantization itself
            new = self._left(chain[-1][0], module.float_module, "unwrapped")
        else:
            self._visit_children(module, chain, default)
            return module
        self.done[id(module)] = (module, new)
        return new

    def _left(self, name: str, module: nn.Module, why: str) -> nn.Module:
        self.outcomes.append(Outcome(name, type(module).__name__, "floating point", why))
        return self._close(module)

    def _close(self, module: nn.Module) -> nn.Module:
        self.closed |= {id(part) for part in module.modules()}
        return module

    def _mapped(
        self, module: nn.Module, chain: Chain, mapping: QuantizedMetadata, default: LayerScheme | None
    ) -> nn.Module:
        name, action = chain[-1][0], mapping.action
        inner = module.float_module if isinstance(module, Wrapper) else module
        if action is ReplacementAction.SKIP:
            return self._left(name, inner, "action SKIP")
        if action is ReplacementAction.UNWRAP:
            unwrapped = getattr(module, "float_module", None)
            if not isinstance(unwrapped, nn.Module):
                got = f"UNWRAP of a {type(module).__name__}"
                raise ArgumentError(f"{name}: action", got, "a module with float_module")
            return self._left(name, unwrapped, "unwrapped")
        if default is not None:
            default = with_descriptors(default, mapping.input_quant_descriptor, mapping.weights_quant_descriptor)
        best = strongest([rule for rule in self.rules if isinstance(rule.what, LayerScheme)], chain)
        place: LayerScheme | None = default if best is None else best[0].what  # type: ignore[assignment]
        self.mapped.add(id(inner))  # a counterpart may hold the module that it was made of
        if action is ReplacementAction.RECURE_AND_REPLACE:
            self.defaults[id(inner)] = default
            self._visit_children(inner, chain, default)
            self.later.append((inner, mapping, place, name))
            return inner
        new = self._built(inner, mapping, place, name)
        if action is ReplacementAction.REPLACE:
            return self._close(new)
        if isinstance(new, tuple(SIMULATED)):  # the target is a layer itself
            made = [] if is_simulated(new) or place is None else twins_of([Fate(Site(new, [name]), place)], simulated)
            return self._close(made[0][1] if made else new)
        self.defaults[id(new)] = default
        self._visit_children(new, [*chain[:-1], (name, new)], default)
        return new

    def _make_blocks(self) -> None:
        """The counterparts that are made of blocks whose layers are quantised, inner ones first."""
        for inner, mapping, place, name in self.later:
            new = self._built(inner, mapping, place, name)
            places = distinct(self.model, lambda _, module, inner=inner: module is inner)  # type: ignore[misc]
            swap_modules(self.model, [(names, new) for names, _ in places], undo=self.undo)

    def _built(self, inner: nn.Module, mapping: QuantizedMetadata, place: LayerScheme | None, name: str) -> nn.Module:
        new = mapping.build(inner, None if place is None else place.scheme, name)
        self.outcomes.append(Outcome(name, type(inner).__name__, type(new).__name__, mapping.action.name))
        return new

    # ---- rules

    def _decide(self, module: nn.Module, chains: Sequence[Chain]) -> LayerDecision:
        """The rule for a module under all its names. Raises ArgumentError where the names disagree."""
        decisions = [self._decide_at(module, chain) for chain in chains]
        named = [d for d in decisions if d.kind not in ("default", "class")]
        if len({d.what for d in named}) > 1:
            rule_by_name = ", ".join(f"{chain[-1][0]}: {d.key}" for chain, d in zip(chains, decisions, strict=True))
            got = f"one shared module under several names ({rule_by_name})"
            raise ArgumentError("model", got, "one rule for all its names")
        return named[0] if named else decisions[0]

    def _decide_at(self, module: nn.Module, chain: Chain) -> LayerDecision:
        best = strongest(self.rules, chain)
        own: QuantizedMetadata | None = None
        if isinstance(module, QuantizedMapping):
            own = module.mapping
        elif not isinstance(module, Wrapper):
            own = self.mappings.get(type(module))
        if best is not None and (own is None or best[1] != "type" or best[0].kind_at(*chain[-1]) is not None):
            rule, kind = best
            # schemes and skips of a block mean the layers in it; a block that has a counterpart still gets that
            is_last_word = own is None or rule.what is None or isinstance(rule.what, QuantizedMetadata)
            if is_last_word or isinstance(module, self.leaves):
                return LayerDecision(rule.what, kind, rule.key, self._is_own(rule, chain))
        return LayerDecision(None, "default", None) if own is None else LayerDecision(own, "class", type(module))

    def _is_own(self, rule: Rule, chain: Chain) -> bool:
        """Whether a key means the place itself (or the module in whose linear form it is), not a block around it."""
        places = [place for i, place in enumerate(chain) if i == len(chain) - 1 or id(place[1]) in self.forms]
        return any(rule.kind_at(*place) is not None for place in places)


def _last_layers(model: nn.Module, count: int) -> set[nn.Module]:
    layers = [module for module in model.modules() if isinstance(module, tuple(SIMULATED))]
    if count > len(layers):
        raise ArgumentError("skip_last", count, f"at most {len(layers)}, the number of layers")
    return set(layers[len(layers) - count :])
