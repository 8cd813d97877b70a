"""One run of SelectiveQuantizer over a model: block by block, layer by layer, and back to the start where one fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from pyquant.errors import ArgumentError
from pyquant.nn import obstacles, origin
from pyquant.nn.forms import has_form
from pyquant.nn.indivisible import fitted
from pyquant.nn.keep import Kept, kept_layers, remember
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.refusals import already_quantised, check_not_double, is_wholly_quantised
from pyquant.nn.report import quantization_report
from pyquant.nn.sites import PATTERNS, check_names, find_owners
from pyquant.nn.swap import Undo, swap_modules, undone_on_error
from pyquant.nn.tell import warn_of_floats
from pyquant.ptq.layer_scheme import LayerScheme, with_descriptors
from pyquant.ptq.mapping import REGISTERED, QuantizedMapping, QuantizedMetadata, ReplacementAction, Wrapper
from pyquant.ptq.rules import Chain, LayerDecision, Rule, chains_of, check_used, strongest
from pyquant.recipe.recipe import EVERYTHING
from pyquant.simulate.insert import noted, twin_of
from pyquant.simulate.kinds import SIMULATED, is_simulated, simulate

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


class Replacement:
    """The walk over one model. rules: registered keys. mappings: classes with a counterpart, for this quantizer."""

    def __init__(
        self,
        model: nn.Module,
        default: LayerScheme | None,
        rules: Sequence[Rule],
        mappings: Mapping[type[nn.Module], QuantizedMetadata],
        left_alone: Sequence[type[nn.Module]] = (),
        on_indivisible: str = "per_channel",
        like: Like | None = None,
    ) -> None:
        self.model, self.default, self.rules = model, default, rules
        self.mappings = {**REGISTERED, **mappings}
        self.left_alone = tuple(left_alone)
        self.on_indivisible, self.like = on_indivisible, like
        self.forms: dict[int, nn.Module] = {}  # id of a module -> its linear form
        self.kept: dict[int, Kept] = {}
        self.lookups: list[tuple[list[str], nn.Embedding]] = []  # to become QEmbedding when all else is converted
        self.undo: list[Undo] = []
        self.outcomes: list[Outcome] = []
        self.obstacles: set[str] = set()  # reasons for which layers were left that a rule wanted
        self.mapped: set[int] = set()  # modules that a counterpart is being made of
        self.done: dict[int, tuple[nn.Module, nn.Module]] = {}  # id -> (old, kept alive; new)

    def run(self, skip_last: int) -> list[Outcome]:
        """Replace everything. -> one Outcome a layer. On any exception the model is as before."""
        leaves = tuple(SIMULATED)
        model = self.model
        if not isinstance(model, nn.Module) or isinstance(model, leaves) or is_simulated(model):
            raise ArgumentError("model", type(model).__name__, "a torch.nn.Module that contains float layers")
        if is_wholly_quantised(model, leaves):
            raise already_quantised(model)
        check_names(name for name, module in model.named_modules() if isinstance(module, leaves))
        owners = [] if self.like is None or has_form(model) else find_owners(model)
        self.forms = {id(owner.module): owner.form for owner in owners}
        named = leaves if self.like is None or not self.like.embeddings else (*leaves, nn.Embedding)
        check_used(self.rules, model, named, self.forms)
        self.chains = chains_of(model, self.forms)
        if self.like is not None and self.like.heads != EVERYTHING:
            self.kept = kept_layers(model, heads=self.like.heads is True)
            for owner in owners:
                if id(owner.module) in self.kept:
                    inner = dict.fromkeys(map(id, owner.form.modules()), self.kept[id(owner.module)])
                    self.kept |= inner
        self.last = _last_layers(model, leaves, skip_last)
        with undone_on_error(self.undo):
            self._visit_children(model, (), self.default)
            swap_modules(model, [], undo=self.undo)  # encoders whose layers changed leave torch's fused path
            self._warn_of_floats()
            if not self.lookups and not any(_is_quantised(module) for module in model.modules()):
                left = [outcome.name for outcome in self.outcomes if outcome.why in self.obstacles]
                check_not_double(model, map(model.get_submodule, left))
                got = f"a {type(model).__name__} of which no layer would be quantised"
                raise ArgumentError("model", got, "a model with nn.Linear, and rules that leave some of it to quantise")
        return self.outcomes

    def _warn_of_floats(self) -> None:
        """What no rule of any kind could reach: classes that multiply by matrices of their own, and layers with one
        that no rule left alone."""
        skips = [rule for rule in self.rules if rule.what is None]
        wished = {outcome.name for outcome in self.outcomes if outcome.why not in self.obstacles}
        for name, module in self.model.named_modules():
            chains = self.chains.get(id(module), [])
            is_skipped = any(strongest(skips, chain) is not None for chain in chains)
            is_head = self.kept.get(id(module), _NOT_KEPT).is_head
            is_float_head = is_head and self.like is not None and self.like.heads is False
            if is_skipped or is_float_head or self.default is None or isinstance(module, nn.Embedding):
                wished.add(name)
        warn_of_floats(quantization_report(self.model), wished, "SelectiveQuantizer", stacklevel=6)

    def _visit_children(self, parent: nn.Module, above: Chain, default: LayerScheme | None) -> None:
        for child_name, child in list(parent.named_children()) + _shared_children(parent):
            name = f"{above[-1][0]}.{child_name}" if above else child_name
            new = self._visit(child, [*above, (name, child)], default)
            if new is not child:
                # a change at a time: what fails later is taken back with the rest
                swap_modules(parent, [([child_name], new)], undo=self.undo)

    def _visit(self, module: nn.Module, chain: Chain, default: LayerScheme | None) -> nn.Module:
        """What takes the place of a module (itself: nothing), its inside already done."""
        chains = self.chains.get(id(module), [chain])
        decision = self._decide(module, chains)
        if id(module) in self.done:  # a module with several names has one fate
            return self.done[id(module)][1]
        new = self._made(module, chain, decision, default)
        self.done[id(module)] = (module, new)
        return new

    def _made(self, module: nn.Module, chain: Chain, decision: LayerDecision, default: LayerScheme | None) -> nn.Module:
        name, what = chain[-1][0], decision.what
        if isinstance(what, QuantizedMetadata) and id(module) not in self.mapped:
            return self._mapped(module, chain, what, default)
        if isinstance(module, Wrapper):  # a skip by name, or SkipQuantization itself
            self._tell(name, module.float_module, "floating point", "unwrapped")
            return module.float_module
        is_lookup = isinstance(module, nn.Embedding) and not isinstance(module, QEmbedding)
        if isinstance(module, tuple(SIMULATED)) or (is_lookup and self.like is not None and self.like.embeddings):
            return self._leaf(module, chain, decision, default)
        if id(module) in self.forms:
            return self._formed(module, chain, default)
        self._visit_children(module, chain, default)
        return module

    def _formed(self, module: nn.Module, chain: Chain, default: LayerScheme | None) -> nn.Module:
        """What takes the place of a module with a linear form: the form, or itself where no Linear in it changes."""
        name, form, start = chain[-1][0], self.forms[id(module)], len(self.outcomes)
        inside = [*chain, (name, form)]
        new = self._visit(form, inside, default) if isinstance(form, nn.Linear) else form
        if new is form and not isinstance(form, nn.Linear):
            self._visit_children(form, inside, default)
        ranges = None if self.like is None else self.like.ranges
        has_no_range = ranges is not None and not ranges.issuperset(_static_tensors(name, new))
        if has_no_range or not any(_is_quantised(part) for part in new.modules()):
            why = f"no range is given for {name}" if has_no_range else self.outcomes[-1].why
            del self.outcomes[start:]
            return self._kept(module, name, why)
        origin.remember(new, module)
        return new

    def _mapped(
        self, module: nn.Module, chain: Chain, mapping: QuantizedMetadata, default: LayerScheme | None
    ) -> nn.Module:
        name, action = chain[-1][0], mapping.action
        inner = module.float_module if isinstance(module, Wrapper) else module
        if action is ReplacementAction.SKIP:
            self._tell(name, inner, "floating point", "action SKIP")
            return inner
        if action is ReplacementAction.UNWRAP:
            unwrapped = getattr(module, "float_module", None)
            if not isinstance(unwrapped, nn.Module):
                got = f"UNWRAP of a {type(module).__name__}"
                raise ArgumentError(f"{name}: action", got, "a module with float_module")
            self._tell(name, unwrapped, "floating point", "unwrapped")
            return unwrapped
        if default is not None:
            default = with_descriptors(default, mapping.input_quant_descriptor, mapping.weights_quant_descriptor)
        best = strongest([rule for rule in self.rules if isinstance(rule.what, LayerScheme)], chain)
        place: LayerScheme | None = default if best is None else best[0].what  # type: ignore[assignment]
        self.mapped.add(id(inner))  # a counterpart may hold the module that it was made of
        if action is ReplacementAction.RECURE_AND_REPLACE:
            self._visit_children(inner, chain, default)
        new = mapping.build(inner, None if place is None else place.scheme, name)
        self._tell(name, inner, type(new).__name__, action.name)
        if action is ReplacementAction.REPLACE_AND_RECURE:
            if isinstance(new, tuple(SIMULATED)):  # the target is a layer itself
                if is_simulated(new) or place is None:
                    return new
                return twin_of(new, name, lambda made: simulated(made, place))
            self._visit_children(new, [*chain[:-1], (name, new)], default)
        return new

    def _leaf(self, module: nn.Module, chain: Chain, decision: LayerDecision, default: LayerScheme | None) -> nn.Module:
        name = chain[-1][0]
        before: Any = module.to_float() if is_simulated(module) else module
        chains = self.chains.get(id(module), [chain])
        if module in self.last and decision.kind == "default":
            return self._kept(before, name, "one of the last layers")
        if decision.what is None and decision.kind != "default":
            return self._kept(before, name, f"skipped by {decision.key}")
        if isinstance(before, self.left_alone) and decision.kind == "default":
            return self._kept(before, name, "left alone by the recipe")
        layer = decision.what if isinstance(decision.what, LayerScheme) else default
        if layer is None:
            return self._kept(before, name, "named by no rule")
        left = self.kept.get(id(module))
        if left is not None and not (decision.is_own and decision.kind in (PATTERNS if left.is_head else ("name",))):
            self.obstacles.add(left.reason)
            remember(before, left.reason, self.undo)
            return self._kept(before, name, left.reason)
        parents = [c[-2][1] if len(c) > 1 else self.model for c in chains]
        why_not = obstacles.why_not(before, parents)
        if why_not is not None:
            may_stay = why_not.is_usual if self.like is None else why_not.is_final
            if may_stay and decision.kind != "name":
                self.obstacles.add(why_not.reason)
                return self._kept(before, name, why_not.reason)
            raise ArgumentError("model", f"layer '{name}' {why_not.reason}", why_not.remedy)
        scheme, note = fitted(layer.scheme, before, self.on_indivisible, name)
        if scheme is None:
            return self._kept(before, name, note)
        if isinstance(before, nn.Embedding):
            self.lookups.append(([c[-1][0] for c in chains], before))
            self._tell(name, before, "int8 rows")
            return before
        place = replace(layer, scheme=scheme)
        new = twin_of(module, name, lambda _: noted(simulated(before, place), note))
        waits = f"its {' and '.join(sorted(layer.open))} by the method of the calibration" if layer.open else ""
        self._tell(name, before, str(scheme), "; ".join(part for part in (note, waits) if part))
        return new

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
            if is_last_word or isinstance(module, tuple(SIMULATED)):
                return LayerDecision(rule.what, kind, rule.key, self._is_own(rule, chain))
        return LayerDecision(None, "default", None) if own is None else LayerDecision(own, "class", type(module))

    def _is_own(self, rule: Rule, chain: Chain) -> bool:
        """Whether a key means the place itself (or the module in whose linear form it is), not a block around it."""
        places = [place for i, place in enumerate(chain) if i == len(chain) - 1 or id(place[1]) in self.forms]
        return any(rule.kind_at(*place) is not None for place in places)

    def _kept(self, module: nn.Module, name: str, why: str) -> nn.Module:
        self._tell(name, module, "floating point", why)
        return module

    def _tell(self, name: str, module: nn.Module, what: str, why: str = "") -> None:
        self.outcomes.append(Outcome(name, type(module).__name__, what, why))


def _last_layers(model: nn.Module, leaves: tuple[type[nn.Module], ...], count: int) -> set[nn.Module]:
    layers = [module for module in model.modules() if isinstance(module, leaves)]
    if count > len(layers):
        raise ArgumentError("skip_last", count, f"at most {len(layers)}, the number of layers")
    return set(layers[len(layers) - count :])


def _shared_children(parent: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children that named_children leaves out, as they are there under another name."""
    first = {name for name, _ in parent.named_children()}
    return [(name, child) for name, child in parent._modules.items() if child is not None and name not in first]


def _static_tensors(name: str, module: nn.Module) -> Iterator[str]:
    """The tensors of simulating layers in a module of that name that need a range from data."""
    for inner, layer in module.named_modules():
        for tensor, fake in layer.fake_quantizers().items() if is_simulated(layer) else ():
            if tensor != "weight" and not fake.follows:
                yield ".".join(part for part in (name, inner, tensor) if part)


def _is_quantised(module: nn.Module) -> bool:
    return is_simulated(module) or hasattr(module, "fake_quantizers") or isinstance(module, QLinear)


def simulated(module: nn.Module, layer: LayerScheme) -> nn.Module:
    """The simulating twin of a float layer; for a 16-bit scheme the 16-bit layer itself, as it rounds nothing."""
    if layer.scheme.is_float:
        kinds: dict[type, Any] = {nn.Linear: QLinear, nn.Conv2d: QConv2d}
        made = [new.from_float(module, layer.scheme) for old, new in kinds.items() if isinstance(module, old)]
        return made[0].train(module.training) if made else module  # a marker computes nothing
    new = simulate(module, layer.scheme)
    for tensor, fake in new.fake_quantizers().items():
        fake.method_is_open, fake.learn_amax = tensor in layer.open, tensor in layer.learns
    return new
