"""prepare_qat_: a model that trains under the rounding of its integer twin."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch  # noqa: F401  (the example)
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.patches import Patches
from pyquant.errors import ArgumentError
from pyquant.nn.fates import twins_of
from pyquant.nn.indivisible import CHOICES
from pyquant.nn.match import FqnConfig
from pyquant.nn.refusals import check_not_sharded
from pyquant.nn.sites import Config, Filter, Site, find_sites, rules_of
from pyquant.nn.swap import as_it_is, swap_modules
from pyquant.nn.undo import undone_on_error
from pyquant.qat.guards import check_trainable, warn_of_bad_starts
from pyquant.qat.integer import IntegerForwardLinear, why_not_integer
from pyquant.qat.learned import LearnedFakeQuantize
from pyquant.qat.weight import WeightFakeQuantize, copied
from pyquant.recipe import Recipe, is_recipe
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.insert import put_in, simulated, simulated_fates, simulating_fates
from pyquant.simulate.kinds import SIMULATED, is_simulated
from pyquant.simulate.linear import FakeQuantLinear

FORWARDS = ("simulated", "int8")

# True, False; names, globs and 're:' patterns of layers or of tensors ('fc1', '*.input'); or fn(name, layer) -> bool.
Learn = bool | Iterable[str] | Callable[[str, nn.Module], bool]
# One word for all layers, or fn(name, layer) -> word.
Forward = str | Callable[[str, nn.Module], str]


def prepare_qat_(
    model: nn.Module,
    config: Config | Recipe | str | os.PathLike[str] | None = None,
    filter_fn: Filter | None = None,
    *,
    learn_amax: Learn | None = None,
    forward: Forward = "simulated",
    on_indivisible: str | None = None,
) -> nn.Module:
    """Make a model ready for quantisation-aware training, in place.

    model      a float model, or one that simulates already, calibrated by SelectiveQuantizer and
               QuantizationCalibrator: the better start. Its schemes and calibrated ranges stay as they are.
    config     as in quantize_: a QScheme, its name or its preset; an FqnConfig or mapping {key: scheme or None}; a
               Recipe or the path of its file; None for a simulating model.
    filter_fn  fn(module, name) -> bool; of a float model: which layers the config is meant for.
    learn_amax  which ranges are learned (LSQ), of weights and of static inputs and outputs: True for all of them but
               two-level weights and inputs of 16 bits, False for none, patterns of layer names ('blocks.*.fc1') or of
               tensors ('*.weight', 'fc1.input'), or fn(layer name, layer) -> bool. Per tensor, per channel and per
               group. None: all where the recipe says learn_amax; otherwise the tensors of which that was said when
               simulation was put in (default_learn_amax of SelectiveQuantizer, learn_amax of a recipe or of a
               QuantDescriptor).
    forward    'simulated' (float products of rounded operands), 'int8' (integer products, see docs/qat.md 4), or
               fn(layer name, layer) -> one of them.
    on_indivisible  of a float model: layers whose K the scheme's group size does not divide, as in quantize_:
               'per_channel', 'skip' or 'error'. None: what the recipe says, else 'per_channel'. One
               QuantizationWarning names them, and what stays in floating point unasked.
    ->         the model, its parameters shared with the float layers: an optimiser that exists goes on working, except
               for learned scales, which are new parameters. convert_ afterwards needs no calibration.
    Transactional: on any exception the model is as before. Warns (QATWarning) of static ranges that are not calibrated
    yet, and of 4-bit layers with untrained weights. Raises ArgumentError or SchemeError naming the layer; ArgumentError
    too where the recipe, or the one that put the simulation in, says ptq_only.
    Source: docs/qat.md.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> model = prepare_qat_(nn.Sequential(nn.Linear(8, 8)), W8A8Dynamic())
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> model[0].weight.grad.shape
        torch.Size([8, 8])
    """
    if not isinstance(model, nn.Module) or is_simulated(model) or isinstance(model, tuple(SIMULATED)):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module that contains layers")
    check_not_sharded(model, "prepare_qat_ first, then fully_shard (docs/qat.md 7)")
    if is_recipe(config) and not isinstance(config, Recipe):
        config = Recipe.load(cast(str, config))
    simulating = list(find_sites(model, tuple(SIMULATED.values())))
    ptq_only = any(getattr(site.module, "ptq_only", False) for site in simulating)
    if isinstance(config, Recipe):
        ptq_only |= config.ptq_only
        if learn_amax is None and config.selective_quantizer_params.learn_amax:
            learn_amax = True
        on_indivisible = on_indivisible or config.on_indivisible
        if simulating and config.qat is not None and config.qat.start_from == "float":
            allowed = "the float model; or start_from: ptq, to go on from a calibrated one"
            raise ArgumentError("recipe.qat.start_from", "float, for a model that simulates already", allowed)
        config = config.config()
    check_trainable(ptq_only)
    if on_indivisible is not None:
        arguments.one_of("on_indivisible", on_indivisible, CHOICES)
    rules = None if config is None else rules_of(config, model)
    learns = _Learning(learn_amax)
    train = partial(_train, learns=learns, forward=forward)
    if simulating:
        _check_same(simulating, rules, filter_fn)
        new = twins_of(simulating_fates(simulating), lambda fate: train(fate.site.module, name=fate.site.names[0]))
        learns.check_used()
        put_new = partial(swap_modules, model, new)
    else:
        fates = simulated_fates(model, rules, filter_fn, on_indivisible or CHOICES[0])
        new = twins_of(fates, lambda fate: train(simulated(fate), name=fate.site.names[0]))
        if not new:
            raise ArgumentError("config", "no layer", "a config that means at least one layer with 8- or 4-bit weights")
        learns.check_used()
        put_new = partial(put_in, model, fates, new, "prepare_qat_", cast(FqnConfig, rules), filter_fn)
    _check_not_wrapped(model, new)
    with undone_on_error(as_it_is(model)):  # a warning that the caller made an error is one, too
        put_new()
        warn_of_bad_starts((names[0], layer) for names, layer in new)
    return model


def _check_not_wrapped(model: nn.Module, new: Iterable[tuple[Any, nn.Module]]) -> None:
    """DistributedDataParallel has listed the parameters and buffers that it keeps equal: none that are made now."""
    wrapped = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())
    fakes = [fake for _, layer in new for fake in layer.fake_quantizers().values()]  # type: ignore[operator]
    if wrapped and any(isinstance(fake, LearnedFakeQuantize) for fake in fakes):
        got = "a DistributedDataParallel, whose processes would each learn ranges of their own"
        raise ArgumentError("model", got, "the model inside: prepare_qat_ first, then wrap it (docs/qat.md 7)")


def _check_same(sites: list[Site], rules: FqnConfig | None, filter_fn: Filter | None) -> None:
    """A config that is given beside simulating layers must not say anything else than they do."""
    if filter_fn is not None:
        raise ArgumentError("filter_fn", "a function", "None for a model that simulates already")
    for site in sites if rules is not None else ():
        decision = rules.decide(site.names[0], site.module)  # type: ignore[union-attr]
        if decision is None or decision.scheme != site.module.scheme:
            said = "nothing" if decision is None else str(decision.scheme)
            got = f"{said} for '{site.names[0]}', which simulates {site.module.scheme}"
            allowed = "None (the schemes are those of the calibrated layers), or the same schemes"
            raise ArgumentError("config", got, allowed)


def _train(layer: nn.Module, name: str, learns: _Learning, forward: Forward) -> nn.Module:
    """A simulating layer as training wants it, made from `layer`, which is not changed."""
    how = forward(name, layer) if callable(forward) else forward
    arguments.one_of("forward", how, FORWARDS)
    twin = copied(layer, type(layer))
    if how == "int8":
        twin = _integer(name, layer)
    for tensor, fake in layer.fake_quantizers().items():  # type: ignore[operator]
        place = next(child for child, module in layer._modules.items() if module is fake)
        twin._modules[place] = _trained(f"{name}.{tensor}", layer, tensor, fake, learns)
    return twin


def _integer(name: str, layer: nn.Module) -> nn.Module:
    scheme: Any = layer.scheme
    reason = why_not_integer(scheme)
    if type(layer) not in (FakeQuantLinear, IntegerForwardLinear):
        reason = f"it is a {type(layer).__name__}, and only Linear layers have an integer forward"
    if reason is not None:
        raise ArgumentError("forward", f"'int8' for '{name}' ({scheme})", f"'simulated' there: {reason}")
    return IntegerForwardLinear.of(layer)  # type: ignore[arg-type]


def _trained(name: str, layer: nn.Module, tensor: str, fake: FakeQuantize, learns: _Learning) -> FakeQuantize:
    weight = weight_matrix(layer) if tensor == "weight" else None
    is_free = fake.scheme.bits <= 8 and not fake.scheme.two_level  # scales that are steps of another stay steps
    can_learn = (weight is not None or not fake.follows) and is_free
    if learns.means(name, layer, fake, can_learn) and not isinstance(fake, LearnedFakeQuantize):
        return LearnedFakeQuantize.of(fake, weight)
    return WeightFakeQuantize.of(fake) if weight is not None and type(fake) is FakeQuantize else fake


def weight_matrix(layer: nn.Module) -> Tensor:
    """The weights of a simulating layer as the matrix [N, K] that its quantiser sees, detached."""
    weight: Tensor = layer.weight.detach()  # type: ignore[operator,union-attr,assignment]
    return weight if weight.dim() == 2 else Patches.of(layer).matrix(weight)  # type: ignore[arg-type]


class _Learning:
    """Which tensors have a learned range: as the call says, or (None) each as its FakeQuantize says."""

    def __init__(self, wish: Learn | None) -> None:
        self._wish = wish
        self._rules: dict[str, FqnConfig] = {}
        self._used: set[str] = set()
        self._met = False
        if wish is None or isinstance(wish, bool) or callable(wish):
            return
        patterns = [wish] if isinstance(wish, str) else list(arguments.iterable("learn_amax", wish, "patterns"))
        if not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise ArgumentError("learn_amax", repr(wish)[:120], "True, False, patterns of names, or fn(name, layer)")
        self._rules = {pattern: FqnConfig({pattern: None}) for pattern in patterns}

    def means(self, tensor_name: str, layer: nn.Module, fake: FakeQuantize, can_learn: bool) -> bool:
        layer_name = tensor_name.rpartition(".")[0]
        if self._wish is None:
            learns = fake.learn_amax
        elif isinstance(self._wish, bool):
            learns = self._wish
        elif callable(self._wish):
            learns = bool(self._wish(layer_name, layer))
        else:
            names = (layer_name, tensor_name)
            hits = [p for p, rule in self._rules.items() if any(rule.matches(p, name, layer) for name in names)]
            learns = bool(hits)
            if can_learn:
                self._used.update(hits)
        self._met |= learns and can_learn
        return learns and can_learn

    def check_used(self) -> None:
        unused = [pattern for pattern in self._rules if pattern not in self._used]
        if unused or (self._wish is True and not self._met):
            got = f"no range to learn for {', '.join(map(repr, unused)) or 'any layer'}"
            names = "names of layers, or of tensors such as 'fc1.weight' and 'fc1.input'"
            raise ArgumentError("learn_amax", got, f"{names}; dynamic ranges follow their data")


def range_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The learned scales of a model: leave them out of weight decay, and out of FSDP's mixed precision."""
    return [m.scale for m in model.modules() if isinstance(m, LearnedFakeQuantize)]  # type: ignore[misc]
