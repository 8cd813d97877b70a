"""What smooth_ knows: in which module classes a norm or Linear feeds nothing but certain Linears."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn.expert_rules import rule_of
from pyquant.nn.experts import QExperts
from pyquant.nn.hadamard_linear import HadamardLinear
from pyquant.ptq.improve import smooth_families
from pyquant.ptq.improve.smooth_families import Rule

_BY_CLASS: dict[type[nn.Module], list[Rule]] = {}
_MIXTURES: Final = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe")
_FAMILIES: Final = ("Llama", "Mistral", "Qwen2", "Qwen3", *_MIXTURES, "Granite", "SmolLM3", "Phi3")
RMS_NORMS: Final = (*(f"{family}RMSNorm" for family in _FAMILIES), "T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm")
_ROUTERS: Final = tuple(f"{family}TopKRouter" for family in _MIXTURES)  # multiply by `weight` [E, K]
_PASSES: Final = (nn.ReLU, nn.Identity, nn.Dropout)  # positively homogeneous: f(x / s) = f(x) / s


def register_smoothing(parent_class: type[nn.Module], producer: str, consumers: Sequence[str]) -> type[nn.Module]:
    """Tell smooth_ and equalize_ that a module class feeds the result of one layer to some others and to nothing else.

    parent_class  subclass of nn.Module; instances of exactly this class are meant.
    producer      path of an attribute, such as 'norm1' or 'mlp.up': a LayerNorm, RMSNorm or Linear; for equalize_ alone
                  also a Conv2d.
    consumers     paths of the Linears (for equalize_ also Conv2ds) that read its result, or for smooth_ banks of
                  experts behind the Linear that routes to them; between the two there may be what commutes with a
                  positive factor for each channel (nothing, ReLU, dropout, attention's mixing of tokens).
    ->            parent_class. Registering the same again changes nothing.
    Raises ArgumentError for names that are none and for a producer that is registered with other consumers.

    Example:
        >>> class Feed(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)
        ...     def forward(self, x):
        ...         return x + self.fc(self.norm(x))
        >>> _ = register_smoothing(Feed, "norm", ["fc"])
    """
    if not isinstance(parent_class, type) or not issubclass(parent_class, nn.Module):
        raise ArgumentError("parent_class", repr(parent_class)[:120], "a subclass of torch.nn.Module")
    if not isinstance(consumers, (list, tuple)) or not consumers:
        raise ArgumentError("consumers", arguments.shown(consumers), "a sequence of attribute paths, such as ['fc1']")
    for argument, path in (("producer", producer), *(("consumers", c) for c in consumers)):
        if not isinstance(path, str) or not all(part.isidentifier() or part.isdigit() for part in path.split(".")):
            raise ArgumentError(argument, repr(path)[:120], "the path of an attribute of the class's instances")
    rule = (producer, tuple(consumers))
    known = _BY_CLASS.setdefault(parent_class, [])
    if any(old[0] == producer and old != rule for old in known):
        raise ArgumentError("producer", producer, "a producer that is not registered yet for this class")
    if rule not in known:
        known.append(rule)
    return parent_class


def pairs_of(parent: nn.Module) -> Iterator[Rule]:
    """(producer, consumers) below one module that its class is known for, as paths. ArgumentError where a class that
    the user registered lacks one of its attributes."""
    if "forward" in parent.__dict__:
        return
    kind = type(parent)
    for producer, consumers in _BY_CLASS.get(kind, ()):
        for path in (producer, *consumers):
            if find(parent, path) is None:
                raise ArgumentError("model", f"a {kind.__name__} without '{path}'", "what register_smoothing names")
        yield producer, consumers
    if kind.forward is nn.Sequential.forward:
        yield from _neighbours(parent)
    elif kind is nn.TransformerEncoderLayer:
        if parent.norm_first:
            yield "norm2", ("linear1",)
        if parent.activation in (F.relu, torch.relu) or isinstance(parent.activation, nn.ReLU):
            yield "linear1", ("linear2",)
    elif kind.__module__.startswith("transformers.models."):
        yield from (rule for rule in smooth_families.rules_of(parent) if _fits(parent, rule))


def is_producer(module: nn.Module) -> bool:
    """Whether dividing a module's weight (and bias) by a factor divides its result by it, channel by channel."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__ in RMS_NORMS:
        return isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.dim() == 1  # type: ignore[union-attr,operator]
    return type(module) is nn.Linear


def matrices_of(consumer: nn.Module) -> list[Tensor]:
    """The matrices [.., N, K] with which a consumer multiplies what it reads: a Linear's or a router's weight, the
    first ones of all experts of a bank. [] for a module that is none."""
    if type(consumer) is nn.Linear or type(consumer).__name__ in _ROUTERS:
        return [cast(Tensor, consumer.weight)]
    if isinstance(consumer, QExperts):
        firsts = [up for up, _ in consumer.experts()]
        return [cast(Tensor, up.weight) for up in firsts] if all(type(up) is nn.Linear for up in firsts) else []
    rule = rule_of(consumer)
    if rule is None:
        return []
    up = cast(Tensor, consumer._parameters[rule.up])
    return [up.mT if rule.is_transposed else up]


def find(parent: nn.Module, path: str) -> Any:
    """The submodule at a path, or None."""
    for part in path.split("."):
        child = parent._modules.get(part)
        if child is None:
            return None
        parent = child
    return parent


def flatten(pairs: Iterable[Any]) -> Iterator[Rule]:
    """What a user gave as pairs; ArgumentError for anything but (name, names)."""
    for pair in arguments.iterable("pairs", pairs, "pairs"):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ArgumentError("pairs", repr(pair)[:120], "('name of the producer', ['names', 'of its consumers'])")
        yield pair[0], (pair[1],) if isinstance(pair[1], str) else tuple(pair[1])


def _neighbours(parent: nn.Module) -> Iterator[Rule]:
    """In an nn.Sequential: a norm or Linear, things that a positive factor passes through, and the next Linear."""
    producer: str | None = None
    for name, module in parent._modules.items():
        if producer is not None and type(module) is nn.Linear:
            yield producer, (name,)
        if module is not None and is_producer(module):
            producer = name
        elif type(module) not in _PASSES:
            producer = None


def _fits(parent: nn.Module, rule: Rule) -> bool:
    """Whether all are there; a Linear that feeds others of another width does so through grouped-query attention."""
    producer, *consumers = (find(parent, path) for path in (rule[0], *rule[1]))
    if (
        producer is None
        or not is_producer(producer)
        or None in consumers
        or any(isinstance(c, HadamardLinear) for c in consumers)
    ):
        return False  # the transform mixes channels: a factor of one cannot pass it
    if isinstance(producer, nn.Linear) and any(c.in_features != producer.out_features for c in consumers):
        return False
    return all(matrices_of(c) for c in consumers if type(c) is not nn.Linear)
