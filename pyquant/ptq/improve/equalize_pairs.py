"""Which layers feed which with nothing in between but what a positive factor for each channel passes through: read from
the graph of a model that torch.fx can trace, from the rules of smooth_ where it cannot, or given by the user."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pyquant.core.modes import evaluating
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles
from pyquant.ptq.improve import smooth_rules as rules
from pyquant.ptq.improve.smooth_families import Rule

# f(s x) = s f(x) for s > 0, channel by channel, and zeros (padding) stay zeros
_MODULES: Final = (
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity, nn.Dropout, nn.Dropout2d, nn.Flatten),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d),
)
_FUNCTIONS: Final = {
    *(F.relu, torch.relu, torch.relu_, F.leaky_relu, F.dropout, F.dropout2d, torch.flatten),
    *(F.max_pool2d, F.avg_pool2d, F.adaptive_max_pool2d, F.adaptive_avg_pool2d, torch.max_pool2d),
}
_METHODS: Final = {"relu", "relu_", "contiguous", "flatten"}
_LOOKS: Final = {"size", "dim"}  # of a tensor, but not at its numbers


class Link:
    """A producer and the layers that read its channels, by name; the same for Linears and convolutions: a weight as
    [groups, outputs, inputs] of magnitudes."""

    def __init__(self, producer: str, consumers: tuple[str, ...], modules: dict[str, nn.Module]) -> None:
        self.producer, self.consumers = producer, consumers
        self.modules = {name: modules[name] for name in (producer, *consumers)}
        self.channels = _rows(self.modules[producer])

    @property
    def names(self) -> tuple[str, ...]:
        """Of all its layers."""
        return (self.producer, *self.consumers)

    def misfit(self) -> str | None:
        """What does not fit together; None: nothing."""
        for name, module in self.modules.items():
            if type(module) not in (nn.Linear, nn.Conv2d):
                return f"'{name}', a {type(module).__name__}"
            if obstacles.has_hooks(module) or "forward" in module.__dict__:
                return f"'{name}', which has hooks or a forward of its own"
        spread = type(self.modules[self.producer]) is nn.Conv2d  # whose flattened channels are runs of inputs
        for name in self.consumers:
            inputs = _columns(self.modules[name])
            flattened = spread and type(self.modules[name]) is nn.Linear and inputs % self.channels == 0
            if inputs != self.channels and not flattened:
                return f"'{name}' of {inputs} inputs after {self.channels} channels"
        return None


def links_of(model: nn.Module, given: Iterable[Any] | None) -> list[Link]:
    """The links of a model, in the order of its layers. Raises ArgumentError for pairs that are none, and where there
    is none to be found."""
    modules = dict(model.named_modules())
    if given is not None:
        return [_given(modules, *names) for names in rules.flatten(given)]
    tied = Counter(id(p) for m in modules.values() for p in m._parameters.values() if p is not None)
    found: dict[str, Link] = {}
    for producer, consumers in (*_traced(model), *_by_rules(modules)):
        if producer in found:
            continue
        if not all(isinstance(modules.get(name), (nn.Linear, nn.Conv2d)) for name in (producer, *consumers)):
            continue
        link = Link(producer, consumers, modules)
        shared = any(tied[id(p)] > 1 for m in link.modules.values() for p in m.parameters(recurse=False))
        if link.misfit() is None and not shared:
            found[producer] = link
    readers = Counter(name for link in found.values() for name in link.consumers)
    links = [found[name] for name in modules if name in found and all(readers[c] == 1 for c in found[name].consumers)]
    if not links:
        shown = "neither its graph (torch.fx) nor a rule for its blocks shows a Linear or Conv2d that feeds another one"
        got = f"a {type(model).__name__}: {shown} through a ReLU or nothing"
        between = any(isinstance(module, nn.BatchNorm2d) for module in modules.values())
        fold = "fold_batch_norm_ first, as BatchNorms stand between; " if between else ""
        raise ArgumentError("model", got, f"{fold}pairs=..., or register_smoothing")
    return links


def magnitudes(link: Link, name: str) -> Tensor:
    """float32 [groups, outputs of a group, channels of a group]: the largest magnitude of each kernel."""
    module: Any = link.modules[name]
    groups = module.groups if isinstance(module, nn.Conv2d) else 1
    weight = module.weight.detach().abs().float().flatten(2) if module.weight.dim() > 2 else module.weight.abs().float()
    if weight.dim() == 3:
        weight = weight.amax(2)
    elif name != link.producer and weight.shape[1] != link.channels:
        weight = weight.unflatten(1, (link.channels, -1)).amax(2)
    return weight.unflatten(0, (groups, -1))


def _given(modules: dict[str, nn.Module], producer: str, consumers: tuple[str, ...]) -> Link:
    for name in (producer, *consumers):
        if name not in modules:
            raise ArgumentError("pairs", repr(name), "names of modules of the model")
        if not isinstance(modules[name], (nn.Linear, nn.Conv2d)):
            raise ArgumentError("pairs", f"'{name}', a {type(modules[name]).__name__}", "Linears and Conv2ds")
    link = Link(producer, consumers, modules)
    misfit = link.misfit()
    if misfit is not None or not consumers:
        got = misfit or f"no consumer of '{producer}'"
        raise ArgumentError("pairs", got, "Linears and Conv2ds whose inputs are the producer's channels")
    return link


def _rows(module: nn.Module) -> int:
    return int(module.weight.shape[0])  # type: ignore[union-attr,index]


def _columns(module: Any) -> int:
    return int(module.in_channels if isinstance(module, nn.Conv2d) else module.weight.shape[1])


def _by_rules(modules: dict[str, nn.Module]) -> Iterator[Rule]:
    for name, parent in modules.items():
        prefix = f"{name}." if name else ""
        for producer, consumers in rules.pairs_of(parent):
            yield prefix + producer, tuple(prefix + consumer for consumer in consumers)


def _traced(model: nn.Module) -> Iterator[Rule]:
    """Links in the graph of a model; none where it cannot be traced."""
    try:
        with evaluating(model):
            graph = fx.Tracer().trace(model)
    except Exception:  # what a model's code does with a proxy is its own; the rules remain
        return
    modules = dict(model.named_modules())
    layers = {n: modules[str(n.target)] for n in graph.nodes if n.op == "call_module" and str(n.target) in modules}
    calls = Counter(id(module) for module in layers.values())

    def is_layer(node: fx.Node) -> bool:
        return type(layers.get(node)) in (nn.Linear, nn.Conv2d) and calls[id(layers[node])] == 1

    for node in graph.nodes:
        if is_layer(node):
            consumers = _readers(node, layers, is_layer)
            if consumers:
                yield str(node.target), tuple(consumers)


def _readers(node: fx.Node, layers: dict[fx.Node, nn.Module], is_layer: Any) -> list[str]:
    """Names of the layers that read a node's channels; [] where anything else does."""
    found: list[str] = []
    ends = [node]
    for end in ends:
        for user in end.users:
            if _looks(user):
                continue
            if not user.args or user.args[0] is not end:
                return []
            if is_layer(user):
                found.append(str(user.target))
            elif _passes(user, layers):
                ends.append(user)
            else:
                return []
    return found


def _looks(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _LOOKS
    return node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "ndim", "dtype")


def _passes(node: fx.Node, layers: dict[fx.Node, nn.Module]) -> bool:
    """Whether a factor for each channel passes through what a node computes of its first argument."""
    flattens, start = False, 0
    if node.op == "call_module":
        module = layers[node]
        if type(module) not in _MODULES or obstacles.has_hooks(module) or "forward" in module.__dict__:
            return False
        flattens, start = type(module) is nn.Flatten, getattr(module, "start_dim", 1)
    elif node.op == "call_method":
        if node.target in ("view", "reshape"):
            return bool(len(node.args) == 3 and node.args[2] == -1) and _is_batch(node.args[1], node.args[0])
        flattens = node.target == "flatten"
        if node.target not in _METHODS:
            return False
    elif node.op != "call_function" or node.target not in _FUNCTIONS:
        return False
    else:
        flattens = node.target is torch.flatten
    if flattens and node.op != "call_module":
        start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)  # type: ignore[assignment]
    return not flattens or start == 1


def _is_batch(size: Any, of: Any) -> bool:
    """Whether a node is the first size of another one."""
    if not isinstance(size, fx.Node):
        return False
    if size.op == "call_method" and size.target == "size":
        return size.args == (of, 0)
    if size.target is not operator.getitem or size.args[1] != 0:
        return False
    shape = size.args[0]
    if not isinstance(shape, fx.Node) or not shape.args or shape.args[0] is not of:
        return False
    return shape.target == "size" or (shape.target is getattr and shape.args[1] == "shape")
