"""Linear forms: classes that multiply by matrices of their own, rewritten as modules made of nn.Linear.

The one table to extend for a class that is a Linear under another name, or holds several of them. Classes of other
packages are known by their qualified name, so that nothing is imported for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles, origin
from pyquant.nn.attention import Attention, linear_of
from pyquant.nn.expert_rules import rule_of
from pyquant.nn.experts import QExperts
from pyquant.nn.recurrent import Recurrent
from pyquant.nn.swap import distinct, swap_modules
from pyquant.nn.undo import Undo

Form = Callable[[Any], nn.Module]
Back = Callable[[Any, Any], Any]
_MARK: Final = "_pyquant_form_of"  # attribute of a form: the name of the class that it stands for


def _transposed(module: Any) -> nn.Linear:
    """transformers' Conv1D: x @ weight + bias, weight [K, N]."""
    return linear_of(module.weight.t(), module.bias)


def _transposed_back(linear: nn.Linear, module: Any) -> None:
    weight = nn.Parameter(linear.weight.detach().t().contiguous(), linear.weight.requires_grad)
    module._parameters.update(weight=weight, bias=linear._parameters["bias"])


def _plain(module: Any) -> nn.Linear:
    """A Linear whose own forward computes what nn.Linear's does."""
    return linear_of(module.weight, module.bias)


def _plain_back(linear: nn.Module, module: nn.Module) -> None:
    module._parameters.update(linear._parameters)


# class -> (its linear form, and what puts the numbers of the form back into a module of the class)
_FORMS: Final[dict[type | str, tuple[Form, Back | None]]] = {
    nn.MultiheadAttention: (Attention.from_float, Attention.into_float),
    nn.LSTM: (Recurrent.from_float, Recurrent.into_float),
    nn.GRU: (Recurrent.from_float, Recurrent.into_float),
    "transformers.pytorch_utils.Conv1D": (_transposed, _transposed_back),
    "transformers.models.falcon.modeling_falcon.FalconLinear": (_plain, _plain_back),
}


def register_linear_form(layer: type[nn.Module] | str, make: Form, back: Back | None = None) -> None:
    """Register a class that multiplies by its own matrices for quantize_, expose_linears_ and load_pretrained.

    layer  the class, or its qualified name 'package.module.Class'. Subclasses are meant where they keep its forward.
    make   make(module) -> an nn.Linear, or a module with nn.Linear children, that computes the same; around the
           module's own parameters (or views of them) where it can.
    back   back(form, module), for dequantize_: puts the numbers of a form, whose Linears are floats again, into a
           module of the class as it was before quantize_, whose parameters are all None (assign nn.Parameters). None:
           dequantize_ leaves the form.
    Raises ArgumentError for other arguments, and for nn.Linear, nn.Conv2d and nn.Embedding themselves.

    Example:
        >>> class Doubled(nn.Linear):
        ...     def forward(self, x):
        ...         return x @ (2 * self.weight).T + self.bias
        >>> def plain(layer):
        ...     new = nn.Linear(layer.in_features, layer.out_features)
        ...     new.weight, new.bias = nn.Parameter(2 * layer.weight.detach()), layer.bias
        ...     return new
        >>> register_linear_form(Doubled, plain)
        >>> type(expose_linears_(nn.Sequential(Doubled(2, 2)))[0]).__name__
        'Linear'
    """
    is_class = isinstance(layer, type) and issubclass(layer, nn.Module)
    if layer in obstacles.KINDS or not (isinstance(layer, str) or is_class):
        raise ArgumentError("layer", repr(layer)[:80], "a class of modules without a twin, or its qualified name")
    if not callable(make):
        raise ArgumentError("make", type(make).__name__, "a function: module -> module made of nn.Linear")
    if back is not None and not callable(back):
        raise ArgumentError("back", type(back).__name__, "a function: form, module -> None; or None")
    _FORMS[layer] = (make, back)


def has_form(module: nn.Module) -> bool:
    """Whether a module has a linear form: its class is registered, and nothing changes what the class computes."""
    if _entry(module) is None or "forward" in module.__dict__ or parametrize.is_parametrized(module):
        return False
    return not any(p is not None and is_lazy(p) for p in module._parameters.values())


def form_of(module: nn.Module) -> nn.Module:
    """The linear form of a module that has_form, with its hooks; errors of a registered function go through."""
    entry = _entry(module)
    if entry is None:
        raise TypeError(f"{type(module).__name__} has no linear form")
    form = entry[0](module)
    if not isinstance(form, nn.Module):
        raise ArgumentError("make", f"a {type(form).__name__} for {type(module).__name__}", "a torch.nn.Module")
    if not isinstance(form, nn.Linear):
        form.__dict__[_MARK] = type(module).__name__
    form.train(module.training)
    obstacles.carry_hooks(module, form)
    return form


def linears_of(name: str, form: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The Linears of a form, with their names in the model; `name` is that of the form."""
    for child, module in form.named_modules():
        if isinstance(module, nn.Linear):
            yield ".".join(part for part in (name, child) if part), module


def expose_linears_(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> nn.Module:
    """Replace classes that multiply by matrices of their own by modules made of nn.Linear, in place.

    model      nn.Module. nn.MultiheadAttention becomes q_proj, k_proj, v_proj and out_proj; nn.LSTM and nn.GRU become
               ih_l0, hh_l0 and so on; Conv1D and FalconLinear of transformers, and what register_linear_form names,
               become what their form says. Parameters keep their memory.
    filter_fn  filter_fn(module, name) -> bool: modules for which it is false are left; None: all.
    ->         the model; it computes the same. quantize_ and recipes do this by themselves; SelectiveQuantizer,
               prepare_qat_ and insert_fake_quantize_ see only nn.Linear and want it done before, optimisers after.

    Example:
        >>> model = expose_linears_(nn.Sequential(nn.LSTM(4, 3)))
        >>> [name for name, _ in model.named_parameters()][:2]
        ['0.ih_l0.weight', '0.ih_l0.bias']
    """
    arguments.module("model", model)
    if has_form(model):
        raise ArgumentError("model", f"a {type(model).__name__} itself", "a model that contains such modules")
    expose_reversibly(model, filter_fn, [])
    return model


def expose_reversibly(
    model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None, undo: list[Undo], remembers: bool = False
) -> None:
    """expose_linears_ for a caller that may still fail; remembers: dequantize_ is to bring the modules back."""

    def is_meant(name: str, module: nn.Module) -> bool:
        return bool(name) and has_form(module) and (filter_fn is None or filter_fn(module, name))

    new = [(names, form_of(module), module) for names, module in distinct(model, is_meant)]
    for _, form, module in new if remembers else ():
        origin.remember(form, module)
    swap_modules(model, [(names, form) for names, form, _ in new], undo=undo)


def exposed(model: nn.Module) -> dict[str, str]:
    """{name: class that it stands for} of the modules that were put in the place of others, but for plain Linears."""
    found = model.named_modules(remove_duplicate=False)
    return {name: str(module.__dict__[_MARK]) for name, module in found if _MARK in module.__dict__}


def restored(form: nn.Module, quantised: nn.Module) -> nn.Module:
    """The module that stood where `quantised` stands before quantize_, with the numbers of `form`, its float twin (or
    itself, where its Linears are floats again); `form` where none is known, or where a part is no plain Linear."""
    module = origin.origin_of(quantised)
    if module is None:
        return form
    entry = _entry(module)
    back = entry[1] if entry is not None else _plain_back
    parts = [m for m in (_parts(form) if entry is not None else ()) if m is not form or isinstance(m, nn.Linear)]
    if back is None or any(type(part) is not nn.Linear for part in parts):
        return form
    back(form, module)
    obstacles.carry_hooks(quantised, module)
    return module.train(form.training)


def _parts(form: nn.Module) -> Iterator[nn.Module]:
    """What of a form has to be plain Linears again before a module can be made of them."""
    return (layer for pair in form.experts() for layer in pair) if isinstance(form, QExperts) else form.modules()


def _entry(module: nn.Module) -> tuple[Form, Back | None] | None:
    """The functions of the closest class in the table whose forward is still the one that runs; or those of experts,
    which have a table of their own."""
    kind = type(module)
    for base in kind.__mro__:
        entry = _FORMS.get(base) or _FORMS.get(f"{base.__module__}.{base.__qualname__}")
        if entry is not None and getattr(base, "forward", None) is kind.forward:
            return entry
    return (QExperts.from_float, QExperts._into_float) if rule_of(module) is not None else None
