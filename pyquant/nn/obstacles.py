"""Why a float layer cannot be replaced by a quantised one; and what must be carried over when it can."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from pyquant.core.dtypes import FLOATS
from pyquant.core.remembered import remembered
from pyquant.nn.class_source import source_of, written_layers
from pyquant.nn.patches import unsupported

# Dicts of an nn.Module that hold hooks of calls; sharing the dict keeps the handles that remove them valid.
HOOKS: Final = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# And those of its state.
_STATE_HOOKS: Final = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_LOAD_HOOKS: Final = "_load_state_dict_pre_hooks"  # which hold the module that they were registered on

# What a call of a float layer runs; of a convolution the second one computes it, and subclasses and patches replace it.
_CALLED: Final = ("forward", "_conv_forward", "__call__")
_TRAINED: Final = ("weight", "bias")
_FROZEN: Final = "_frozen"  # names of parameters of a float layer that were not to be trained
_CARRIED: Final = "_carried"  # names of attributes that a float layer had beside those of its class
# The float classes that have a quantised twin.
KINDS: Final[tuple[type[nn.Module], ...]] = (nn.Linear, nn.Embedding, nn.Conv2d)


@dataclass(frozen=True)
class Obstacle:
    """What is in the way of a quantised twin."""

    reason: str  # what it is
    remedy: str  # what to do
    is_final: bool = True  # nothing that is done to the model later takes it away: the layer is left, and named


# Where other libraries keep a layer's codes beside, or instead of, its weight.
_CODES_ELSEWHERE: Final = ("weight_packed", "qweight")


def holds_foreign_codes(module: nn.Module) -> bool:
    """Whether a float class holds integers as its weight: another library quantised it, and replaced its forward."""
    weight = module._parameters.get("weight")
    is_coded = isinstance(weight, Tensor) and not (weight.is_floating_point() or weight.is_complex())
    return is_coded or any(name in module._parameters or name in module._buffers for name in _CODES_ELSEWHERE)


def why_not(module: nn.Module, parents: Iterable[nn.Module] = ()) -> Obstacle | None:
    """The first obstacle to replacing a module of KINDS, or None."""
    base: Any = next((kind for kind in KINDS if isinstance(module, kind)), None)
    if base is None:  # a marker without weights
        return None
    exclude = "leave it out with filter_fn or None in the config"
    if any(isinstance(parent, nn.MultiheadAttention) for parent in parents):
        what = "belongs to nn.MultiheadAttention, which reads its weight and never calls it"
        return Obstacle(what, f"rewrite the module with pyquant.expose_linears_, or {exclude}")
    for parent in parents:
        if any(child is module and name in written_layers(type(parent)) for name, child in parent._modules.items()):
            return Obstacle(f"belongs to {type(parent).__name__}, which changes its weight in place", exclude)
    if any(p is not None and is_lazy(p) for p in module._parameters.values()):
        return Obstacle("is lazy and has no weights yet", "run one forward pass first", is_final=False)
    if holds_foreign_codes(module):
        return Obstacle(
            "holds codes of another library", f"load the model through pyquant (load_quantized_), or {exclude}"
        )
    if parametrize.is_parametrized(module) or module._parameters.get("weight") is None:
        return Obstacle(_computed("weight"), f"remove it first, or {exclude}")
    for name in _CALLED:
        is_own = getattr(type(module), name, None) is not getattr(base, name, None)
        if name in module.__dict__ or (is_own and not isinstance(module, nn.Embedding)):
            return Obstacle(f"is a {type(module).__name__} with a {name} of its own", exclude)
    unsaved = module._non_persistent_buffers_set if isinstance(module, nn.Embedding) else ()
    held = (*module._parameters, *module._buffers, *module._modules)
    extra = [name for name in held if name not in ("weight", "bias", *unsaved)]
    if extra:
        return Obstacle(f"is a {type(module).__name__} with tensors of its own ({', '.join(extra[:4])})", exclude)
    weight = module._parameters["weight"]
    if not isinstance(weight, Tensor) or type(weight.data) is not Tensor or weight.dtype not in FLOATS:
        kind = f"{type(weight.data).__name__} {weight.dtype}" if isinstance(weight, Tensor) else type(weight).__name__
        return Obstacle(f"has a weight of {kind}", f"a dense float32, float16 or bfloat16 weight, or {exclude}")
    if isinstance(module, nn.Conv2d):
        why = unsupported(module)
        return None if why is None else Obstacle(f"has {why}", exclude)
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return Obstacle(f"has max_norm={module.max_norm}, which changes the weights in place", exclude)
    return None


def read_by(module: nn.Module, parents: Iterable[nn.Module]) -> Obstacle | None:
    """A parent whose forward multiplies by the layer's weight itself and never calls the layer, as its source shows
    (torchvision's ShiftedWindowAttention); or None. Such a product is one of floats: no integers, no static range, and
    nothing that training could simulate."""
    for parent in parents:
        for name, child in parent._modules.items():
            if child is module and _reads_weight(type(parent), name):
                what = f"belongs to {type(parent).__name__}, whose forward reads its weight and never calls it"
                return Obstacle(what, "leave it out with filter_fn or None in the config, or give it a 16-bit scheme")
    return None


# What is asked of a weight that is not multiplied.
_OF_TENSORS: Final = r"(dtype|device|shape|size|ndim|dim|numel|layout|requires_grad|is_\w+|data_ptr|element_size)\b"


@remembered
def _reads_weight(kind: type[nn.Module], name: str) -> bool:
    """Whether forward, or a method that it calls, takes the weight of self.<name>, and no method of the class does
    anything else with that layer than to make it, to ask for its class and to take its weight and bias."""
    try:
        forward = _without_comments(_forward_of(kind))
    except (OSError, TypeError):  # compiled, or typed into a terminal
        return False
    whole = _without_comments(source_of(kind))
    if not whole:
        return False
    layer = rf"\bself\.{re.escape(name)}\b"
    others = re.search(rf"(?<!isinstance\(){layer}(?!\.(weight|bias)\b|\s*(:.*)?=(?!=))", whole)
    return others is None and re.search(rf"{layer}\.weight\b(?!\s*\.{_OF_TENSORS})", forward) is not None


def _without_comments(source: str) -> str:
    return re.sub(r"(?m)^\s*#.*$", "", source)


def _forward_of(kind: type[nn.Module]) -> str:
    """The source of forward and of the methods of the class that it calls, and they. Raises OSError, TypeError."""
    sources: dict[str, str] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            sources[name] = inspect.getsource(getattr(kind, name))
            called = re.findall(r"\bself\.(\w+)\(", sources[name])
            waiting += [one for one in called if inspect.isfunction(inspect.getattr_static(kind, one, None))]
    return "".join(sources.values())


def computed_by_hook(module: nn.Module) -> Obstacle | None:
    """A tensor that a hook of torch.nn.utils computes before each forward from parameters called after it (weight_orig
    of pruning, weight_g of the older weight norm), or None."""
    for name in ("weight", "bias"):
        if name not in module._parameters and any(own.startswith(f"{name}_") for own in module._parameters):
            return Obstacle(_computed(name), "remove it first (torch.nn.utils.prune.remove, remove_weight_norm)")
    return None


def _computed(tensor: str) -> str:
    return f"has a computed {tensor} (parametrisation, weight norm or pruning)"


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is registered to run with the module's calls."""
    held = module.__dict__
    for name in HOOKS:  # noqa: SIM110 - layers ask in each call, and a generator costs three microseconds
        if held.get(name):
            return True
    return False


def is_watched(module: nn.Module) -> bool:
    """Whether its calls cannot be left out: hooks, or a `forward` of the module's own, which is how clocks and other
    libraries lead calls round."""
    return has_hooks(module) or "forward" in module.__dict__


def is_watched_value(activation: object) -> bool:
    """is_watched for what may be a function, which nothing watches."""
    return isinstance(activation, nn.Module) and is_watched(activation)


def carry_attributes(old: nn.Module, new: nn.Module) -> None:
    """What was set on a layer beside what its class has (`layer.scaling = 2.0`), for who reads it there; and back."""
    base: Any = next((kind for kind in KINDS if isinstance(old, kind)), None)
    known = frozenset() if base is None else _of_class(base)
    names = vars(old).get(_CARRIED, ()) if base is None else [n for n in vars(old) if n[0] != "_" and n not in known]
    found = {name: vars(old)[name] for name in names if name in vars(old) and not hasattr(new, name)}
    new.__dict__ |= found | ({_CARRIED: tuple(found)} if found else {})


def carry_frozen(old: nn.Module, new: nn.Module) -> None:
    """Which parameters of a float layer are frozen (requires_grad=False), for freeze_again; codes are never trained."""
    frozen = vars(old).get(_FROZEN)
    if frozen is None:
        frozen = tuple(n for n in _TRAINED if (p := old._parameters.get(n)) is not None and not p.requires_grad)
    if frozen:
        new.__dict__[_FROZEN] = frozen


def freeze_again(quantised: nn.Module, new: nn.Module) -> None:
    """The float layer that a quantised one becomes has the frozen parameters of the one that it was."""
    for name in vars(quantised).get(_FROZEN, ()):
        if (parameter := new._parameters.get(name)) is not None:
            parameter.requires_grad_(False)


@cache
def _of_class(kind: type[nn.Module]) -> frozenset[str]:
    sizes = (1, 1, 1) if kind is nn.Conv2d else (1, 1)
    return frozenset(vars(kind(*sizes, device="meta")))


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """The new module runs the old one's hooks; removing them works through the handles that exist."""
    for name in (*HOOKS, *_STATE_HOOKS, _LOAD_HOOKS):
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]
    new.__dict__["_is_full_backward_hook"] = old.__dict__.get("_is_full_backward_hook")
    for hook in old.__dict__.get(_LOAD_HOOKS, {}).values():
        if getattr(hook, "with_module", False):
            hook.module = _Successor(new, hook.module)


class _Successor:
    """In the place of a hook's weak reference to its module: to the one that took its place, while that is there."""

    def __init__(self, new: nn.Module, before: Callable[[], nn.Module | None]) -> None:
        self._new, self._before = weakref.ref(new), before

    def __call__(self) -> nn.Module | None:
        return self._new() or self._before()
