"""quantize_sharded_: a model whose float weights are cut over ranks already becomes a quantised one, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from pyquant.core import arguments
from pyquant.errors import UnsupportedError
from pyquant.integrations.distributed.styles import PyquantColwise, PyquantRowwise
from pyquant.nn.convert import integer_twin, quantize_layers_
from pyquant.nn.fates import Fate
from pyquant.nn.forms import has_form
from pyquant.nn.keep import remember, remembered
from pyquant.nn.sites import Config, Filter
from pyquant.nn.swap import swap_modules
from pyquant.nn.undo import undone_on_error

_KINDS: Final = (nn.Linear, nn.Embedding)


def quantize_sharded_(
    model: nn.Module,
    config: Config,
    filter_fn: Filter | None = None,
    *,
    styles: Mapping[str, ParallelStyle] | None = None,
    embeddings: bool = False,
    heads: bool | None = None,
    on_indivisible: str = "per_channel",
) -> nn.Module:
    """quantize_ of a model whose weights are DTensors, as parallelize_module leaves them; in place, on every rank.

    model   nn.Module; Linears and Embeddings with DTensor weights on a mesh of one dimension, and others with ordinary
            ones, which are quantised as quantize_ does.
    config, filter_fn, embeddings, heads, on_indivisible   as in quantize_, schemes with dynamic or float inputs.
    styles  {name: PyquantColwise or PyquantRowwise} for layers whose class, not a hook, moves their inputs and results
            (transformers); None: hooks that parallelize_module put on a layer stay, and move them.
    ->      the model, equal to the bit to quantize_ followed by parallelize_module: each layer's weight is put
            together on every rank in turn, quantised as a whole, and cut again. One float weight at a time is whole.
    Raises UnsupportedError for FSDP2, whose groups know the float parameters, for static schemes, and for weights on
    more than one dimension of a mesh; what quantize_ raises. On an error the model is as before.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4))
        >>> type(quantize_sharded_(model, "W8A8Dynamic")[0]).__name__
        'QLinear'
    """
    arguments.module("model", model)
    _refuse_fsdp(model)
    cut = {name: m for name, m in model.named_modules() if isinstance(m, _KINDS) and _is_cut(m)}
    for name, module in cut.items():
        _check(name, module)
    _refuse_forms(model)
    shells = _Shells()
    swaps = [([name], shells.of(module)) for name, module in _everywhere(model, cut)]
    names = {id(module): name for name, module in cut.items()}

    def quantised(_: nn.Module, fates: Sequence[Fate]) -> dict[int, nn.Module]:
        twins = {}
        for fate in fates:
            old = shells.cut.get(id(fate.site.module))
            if fate.layer is not None and old is not None:
                if fate.layer.scheme.is_static:
                    raise _static(fate)
                twins[id(fate.site.module)] = _twin(fate, old, (styles or {}).get(names[id(old)]))
        return twins

    with undone_on_error() as undo:
        swap_modules(model, swaps, undo=undo)
        quantize_layers_(
            model,
            config,
            filter_fn,
            embeddings=embeddings,
            heads=heads,
            on_indivisible=on_indivisible,
            check_speed=False,
            prepare=quantised,
        )
        swap_modules(model, _left(model, shells), undo=undo)
    return model


class _Shells:
    """For each cut layer one of its class, sizes and hooks without numbers, for the rules of quantize_ to judge."""

    def __init__(self) -> None:
        self.cut: dict[int, nn.Module] = {}  # by the shell
        self._made: dict[int, nn.Module] = {}
        self._parameters: dict[int, nn.Parameter] = {}  # weights that are tied stay so

    def of(self, module: nn.Module) -> nn.Module:
        if id(module) not in self._made:
            shell = type(module).__new__(type(module))
            shell.__dict__.update({name: value for name, value in module.__dict__.items() if name != "forward"})
            shell.__dict__["_parameters"] = {n: self._parameter(p) for n, p in module._parameters.items()}
            self._made[id(module)] = shell
            self.cut[id(shell)] = module
        return self._made[id(module)]

    def _parameter(self, given: nn.Parameter | None) -> nn.Parameter | None:
        if given is None:
            return None
        empty = torch.empty(given.shape, dtype=given.dtype, device="meta")
        return self._parameters.setdefault(id(given), nn.Parameter(empty, given.requires_grad))


def _is_cut(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module._parameters.values())


def _everywhere(model: nn.Module, cut: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    wanted = {id(module) for module in cut.values()}
    return [(n, m) for n, m in model.named_modules(remove_duplicate=False) if id(m) in wanted]


def _left(model: nn.Module, shells: _Shells) -> list[tuple[list[str], nn.Module]]:
    """The cut layers that stay in floating point, for their places."""
    left = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if id(m) in shells.cut]
    for _, shell in left:
        remember(shells.cut[id(shell)], remembered(shell), [])
    return [([name], shells.cut[id(shell)]) for name, shell in left]


def _twin(fate: Fate, old: nn.Module, style: ParallelStyle | None) -> nn.Module:
    """The quantised layer of a cut one, cut in the same way."""
    weight: Any = old._parameters["weight"]
    whole = type(old).__new__(type(old))
    whole.__dict__.update(old.__dict__)
    whole.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(_whole(p), requires_grad=False) for name, p in old._parameters.items()
    }
    new = integer_twin(replace(fate, site=replace(fate.site, module=whole)))
    mesh, placement = weight.device_mesh, weight.placements[0]
    style = style or _style(old, placement)
    if style is not None:
        style.src_data_rank = None  # every rank has put the same numbers together
        style._apply(new, mesh)
    return new


def _style(old: nn.Module, placement: Any) -> ParallelStyle | None:
    """What cuts a layer as its float weight is, where hooks of parallelize_module stand around it: they give and take
    DTensors."""
    if not isinstance(placement, Shard):
        return None
    of_rows = placement.dim % 2 == 0
    colwise = of_rows if isinstance(old, nn.Linear) else not of_rows
    return PyquantColwise(use_local_output=False) if colwise else PyquantRowwise(use_local_output=False)


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _check(name: str, module: nn.Module) -> None:
    weight: Any = module._parameters["weight"]
    mesh: DeviceMesh | None = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.ndim != 1:
        got = "an ordinary weight beside a DTensor" if mesh is None else f"a weight on a mesh of {mesh.ndim} dimensions"
        raise UnsupportedError(f"layer '{name}' has {got}: quantise before the model is sharded")
    if not isinstance(weight.placements[0], (Shard, Replicate)):
        raise UnsupportedError(f"layer '{name}' has a weight of {weight.placements[0]}; allowed: Shard, Replicate")


def _static(fate: Fate) -> UnsupportedError:
    return UnsupportedError(
        f"layer '{fate.site.names[0]}': a static scheme for a model that is sharded already, whose ranges data would "
        "have to give: quantise first and call parallelize_module with PyquantColwise and PyquantRowwise, or take a "
        "dynamic scheme"
    )


def _refuse_fsdp(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            raise UnsupportedError(
                f"module '{name}' is sharded by fully_shard, whose groups hold its float parameters: build the model "
                "again on the meta device, quantize_from_shards_(it, this_model.state_dict(), config), then "
                "codes_to_parameters_ and fully_shard"
            )


def _refuse_forms(model: nn.Module) -> None:
    """Matrices that quantize_ makes layers of first: banks of experts, attention, Conv1D."""
    for name, module in model.named_modules():
        if has_form(module) and any(isinstance(p, DTensor) for p in module.parameters()):
            raise UnsupportedError(
                f"module '{name}', a {type(module).__name__}, whose cut weights are no Linears: quantise before the "
                "model is sharded"
            )
