"""Steps before a layer that a file names and the model's code does not build: sorted and transformed inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.checkpoint import Checkpoint
from pyquant.io.pretrained.save import OWN_EXTRA, modules_by_name
from pyquant.nn import hadamard_linear
from pyquant.nn.hadamard_linear import HadamardLinear
from pyquant.nn.reordered import Reordered, check_order
from pyquant.nn.swap import swap_modules
from pyquant.nn.undo import Undo


def put_before(skeleton: nn.Module, checkpoint: Checkpoint, undo: list[Undo]) -> None:
    """Wrap the Linears that the saved model had wrapped. Raises CheckpointError."""
    reordered, turned = _listed(checkpoint)

    def sorted_inputs(name: str, columns: int) -> Callable[[nn.Linear], nn.Module]:
        order = checkpoint.tensors.get(f"{name}.order")
        check_order(order, columns)
        return lambda linear: Reordered(linear, cast(Tensor, order))

    def transformed(name: str, columns: int) -> Callable[[nn.Linear], nn.Module]:
        block, scale = _transform(turned[name], columns)
        return lambda linear: HadamardLinear(linear, block, scale)

    _wrap(skeleton, "reordered", reordered, Reordered, sorted_inputs, undo)
    _wrap(skeleton, "hadamard", turned, HadamardLinear, transformed, undo)


def linear_behind(checkpoint: Checkpoint, name: str, linear: nn.Linear) -> nn.Linear | None:
    """The Linear that multiplies what the saved step before the layer `name` gives, so that both are the function of
    `linear`; None where the file has no such step. Raises CheckpointError."""
    reordered, turned = _listed(checkpoint)
    try:
        if name in turned:
            return hadamard_linear.linear_behind(linear, *_transform(turned[name], linear.in_features))
        if name not in reordered:
            return None
        order = checkpoint.tensors.get(f"{name}.order")
        check_order(order, linear.in_features)
    except ArgumentError as error:
        raise bad_extra(f"'{name}': {error}") from None
    inner = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    inner.weight = nn.Parameter(linear.weight.detach().index_select(1, cast(Tensor, order)), requires_grad=False)
    inner.bias = linear.bias
    return inner


def _listed(checkpoint: Checkpoint) -> tuple[list[str], Mapping[str, Any]]:
    """Names of layers that sort their inputs, and {name: block or [block, scale]} of those that transform them, as a
    file has them."""
    own = checkpoint.extra.get(OWN_EXTRA, {})
    reordered, turned = own.get("reordered", []), own.get("hadamard", {})
    if not isinstance(reordered, list) or not all(isinstance(name, str) and name for name in reordered):
        raise bad_extra("reordered is not a list of names")
    if not isinstance(turned, Mapping) or not all(turned):
        raise bad_extra("hadamard is not {name: block}")
    return reordered, turned


def _transform(listed: Any, columns: int) -> tuple[int, float | None]:
    """Block and scale of a layer in a file: a number is a block of an orthogonal map. Raises ArgumentError."""
    block, scale = listed if isinstance(listed, list) and len(listed) == 2 else (listed, None)
    hadamard_linear.check_block(block, columns)
    hadamard_linear.check_scale(scale)
    return block, scale


def _wrap(
    skeleton: nn.Module,
    key: str,
    listed: Any,
    kind: type[nn.Module],
    checked: Callable[[str, int], Callable[[nn.Linear], nn.Module]],
    undo: list[Undo],
) -> None:
    """Put a wrapper around each Linear that is listed; one that stands there already is left, if it is the same."""
    names = modules_by_name(skeleton)
    new: dict[int, tuple[list[str], nn.Module]] = {}
    for name in listed:
        old: Any = names.get(name)
        if not isinstance(old, nn.Linear) and not isinstance(old, kind):
            raise CheckpointError(f"'{name}' was saved as a Linear; the model has a {type(old).__name__} there")
        try:
            wrap = checked(name, cast(int, old.in_features))
        except ArgumentError as error:
            raise bad_extra(f"{key} '{name}': {error}") from None
        if isinstance(old, nn.Linear):
            new.setdefault(id(old), ([], wrap(old)))[0].append(name)
        elif isinstance(old, HadamardLinear):
            block, scale = _transform(listed[name], old.in_features)
            if (old.block, old.scale) != (block, scale):
                saved, has = (f"blocks of {b}, scale {s}" for b, s in ((block, scale), (old.block, old.scale)))
                raise CheckpointError(f"'{name}' was saved with {saved}; the model has {has}")
    swap_modules(skeleton, list(new.values()), undo=undo)


def bad_extra(what: str) -> CheckpointError:
    """The error for words of a file that save_pretrained does not write."""
    return CheckpointError(f"extra['{OWN_EXTRA}']: {what}")
