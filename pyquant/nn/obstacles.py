"""Why a float layer cannot be replaced by a quantised one; and what must be carried over when it can."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from pyquant.core.dtypes import FLOATS
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


# What a call of a float layer runs; of a convolution the second one computes it, and subclasses and patches replace it.
_CALLED: Final = ("forward", "_conv_forward")
# The float classes that have a quantised twin.
KINDS: Final[tuple[type[nn.Module], ...]] = (nn.Linear, nn.Embedding, nn.Conv2d)


@dataclass(frozen=True)
class Obstacle:
    """What is in the way of a quantised twin."""

    reason: str  # what it is
    remedy: str  # what to do
    is_usual: bool = False  # stock models have it, so a config that does not name the layer passes over it
    is_final: bool = True  # nothing that is done to the model later takes it away: quantize_ leaves the layer, says so


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
        return Obstacle(what, f"rewrite the module with pyquant.expose_linears_, or {exclude}", is_usual=True)
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
        return None if why is None else Obstacle(f"has {why}", exclude, is_usual=True)
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return Obstacle(f"has max_norm={module.max_norm}, which changes the weights in place", exclude)
    return None


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


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """The new module runs the old one's hooks; removing them works through the handles that exist."""
    for name in HOOKS:
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]
    new.__dict__["_is_full_backward_hook"] = old.__dict__.get("_is_full_backward_hook")
