"""Every weight matrix that a model holds, whatever class holds it: what quantize_ found no layer for, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from pyquant.core.names import listed
from pyquant.nn.forms import has_form

# Modules whose tensors of several dimensions are added or scaled by, elementwise; no products.
_ELEMENTWISE: Final = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU)
_CONVOLUTIONS: Final = nn.modules.conv._ConvNd


@dataclass(frozen=True)
class Holder:
    """One module with weight matrices of its own. names: of the tensors. size: their bytes."""

    name: str
    module: nn.Module
    names: tuple[str, ...]
    size: int

    @property
    def reason(self) -> str:
        """Why its matrices stay as they are, by what can be seen without running it."""
        shapes = listed([f"{name} {list(self.matrix(name).shape)}" for name in self.names], 3)
        kind = type(self.module).__name__
        if isinstance(self.module, _CONVOLUTIONS):
            return f"a {kind}: of convolutions, only Conv2d has an integer twin"
        if has_form(self.module):
            return f"{kind} multiplies by them itself ({shapes}); pyquant.expose_linears_ makes layers of them"
        if self.is_stack:
            return (
                f"stacked matrices ({shapes}), one an expert or a head, that {kind} multiplies by itself; "
                "pyquant.register_experts says how experts lie"
            )
        may = "multiplies" if self.is_certain else "may multiply"
        return f"{kind} holds them and {may} by them itself ({shapes})"

    def matrix(self, name: str) -> Tensor:
        """One of them; a ScriptModule has no get_parameter."""
        owner, _, last = name.rpartition(".")
        found: Tensor = self.module.get_submodule(owner)._parameters[last] if owner else self.module._parameters[name]  # type: ignore[assignment]
        return found

    @property
    def is_stack(self) -> bool:
        """Whether there are several matrices in one parameter."""
        shapes = [self.matrix(name).shape for name in self.names]
        return any(len(shape) == 3 and shape[0] > 1 for shape in shapes)

    @property
    def is_certain(self) -> bool:
        """Whether the matrices are multiplied by for all that is known of such modules; else they may be added."""
        is_of_torch = type(self.module).__module__.startswith("torch.nn.")
        return self.is_stack or is_of_torch or has_form(self.module)


def _originals(module: nn.Module) -> dict[str, nn.Module]:
    """{name: module} of those that hold what the tensors of a parametrised module are computed from."""
    lists = module._modules.get("parametrizations") if parametrize.is_parametrized(module) else None
    return {} if lists is None else {f"parametrizations.{name}": one for name, one in lists.named_children()}


def holders(model: nn.Module, known: tuple[type[nn.Module], ...]) -> Iterator[Holder]:
    """Modules that hold matrices, in the order of named_modules; a tensor that several modules hold appears once.

    known  classes to leave out: layers with a quantised twin, and the twins. The learned scales of simulating layers
           are no matrices either.
    """
    scales = {id(fake) for m in model.modules() for fake in getattr(m, "fake_quantizers", dict)().values()}
    seen = {id(p) for m in model.modules() if isinstance(m, known) for p in m._parameters.values() if p is not None}
    counted = scales | {id(one) for m in model.modules() for one in _originals(m).values()}  # counted with m
    for name, module in model.named_modules():
        if isinstance(module, (*known, *_ELEMENTWISE)) or id(module) in counted:
            continue
        held = dict(module._parameters)
        for lists, one in _originals(module).items():
            held |= {f"{lists}.{n}": p for n, p in one._parameters.items()}
        matrices = {n: p for n, p in held.items() if is_matrix(p) and id(p) not in seen}
        seen |= {id(p) for p in matrices.values()}
        if matrices:
            size = sum(p.numel() * p.element_size() for p in matrices.values() if p is not None)
            yield Holder(name, module, tuple(matrices), size)


def is_matrix(tensor: Tensor | None) -> bool:
    """Whether a parameter has the shape of something that is multiplied by."""
    if tensor is None or is_lazy(tensor) or not tensor.is_floating_point():
        return False
    return sum(size > 1 for size in tensor.shape) >= 2
