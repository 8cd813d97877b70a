"""retarget: an exported program with its packed weights in the layout of another device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram, passes

from pyquant import ops
from pyquant.core import arguments
from pyquant.core.patches import Patches
from pyquant.core.presets import W4A8TwoLevel
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.nn import state, weights
from pyquant.ops import LinearSpec, rows_layout

_ops = torch.ops.pyquant
_PACKED: Final = {_ops.qlinear.default: 3, _ops.qconv2d.default: 3}  # op -> the place of its spec
_FOR: Final = {"cpu": ("cpu_blocked", "rows"), "cuda": ("rows", rows_layout.BLOCKED)}
_NUMBERS: Final = ("bias", "input_scale", "input_zero_point", "output_scale", "output_zero_point")


def retarget(program: ExportedProgram, device: torch.device | str, *, layout: str | None = None) -> ExportedProgram:
    """Prepare an exported program for another device, in place: its weights are packed again and everything is moved.

    program  what torch.export.export or torch.export.load gave, of a model with QLinears and QConv2ds. The packed
             buffer of a layer is a constant of it and the layout a literal, so that moving alone is not enough.
    device   where it is to run: 'cpu', 'cuda', 'cuda:1'.
    layout   of the packed weights; None: the one that layers have on that device. On a CPU 'rows' is for machines where
             pyquant has no compiled library; for GPUs 'rows' runs on all of them, and 'rows_blocked128' too, but with
             two levels of scales on sm_90 only.
    ->       the program. Codes and scales are the same numbers, so results are the same bits.
    Nothing is changed before everything is packed. Raises ArgumentError; UnsupportedError for a layer whose scales are
    not in the program, or that stands in a branch of torch.cond, where no compiled library can read the CPU's layout,
    and for 'cuda' where no GPU is.

    Example:
        >>> from pyquant import QLinear, W8A8Dynamic
        >>> layer, x = QLinear.from_float(torch.nn.Linear(8, 4), W8A8Dynamic()), torch.randn(3, 8)
        >>> with torch.no_grad():
        ...     program = torch.export.export(layer, (x,))
        >>> torch.equal(retarget(program, "cpu").module()(x), layer(x))
        True
    """
    if not isinstance(program, ExportedProgram):
        raise ArgumentError("program", type(program).__name__, "an ExportedProgram, as torch.export.export gives")
    target = _device(device)
    if layout is not None and layout not in _FOR[target.type]:
        raise ArgumentError("layout", arguments.shown(layout), f"{' or '.join(_FOR[target.type])} on {target.type}")
    for name, part in program.graph_module.named_modules():
        inner = part.graph.nodes if name and isinstance(part, fx.GraphModule) else ()
        if any(node.target in _PACKED for node in inner):
            raise UnsupportedError(
                f"layers stand in a part of the program that runs on its own ({name}: a branch of torch.cond, or a "
                "region with a grad mode of its own): export for the device instead, under torch.no_grad()"
            )
    new: dict[fx.Node, tuple[str, Tensor]] = {}
    specs: list[tuple[fx.Node, int, list[int]]] = []
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in _PACKED:
            at = _PACKED[node.target]
            packed, spec = node.args[1], LinearSpec.from_ints(node.args[at])
            name = program.graph_signature.inputs_to_buffers.get(getattr(packed, "name", ""))
            if name is None:
                raise UnsupportedError(f"{node.name} takes packed weights that are no constant of the program")
            held, wanted = _layer(program, name, spec, target, layout or _layout_of_groups(node, at, target))
            if packed not in new:
                new[packed] = (name, held.packed(wanted))
            specs.append((node, at, list(wanted.to_ints())))
    for packed, (name, buffer) in new.items():
        program.constants[name] = buffer
        packed.meta["val"] = packed.meta["val"].new_empty(buffer.shape)
    for node, at, words in specs:
        node.args = (*node.args[:at], words, *node.args[at + 1 :])
    program.graph_module.recompile()
    return passes.move_to_device_pass(program, str(target))


def _layout_of_groups(node: fx.Node, at: int, target: torch.device) -> str | None:
    """Kernels of convolutions in groups read plain rows of weights; None: as the target likes them."""
    in_groups = node.target is _ops.qconv2d.default and Patches.from_ints(node.args[at + 1]).groups > 1  # type: ignore[arg-type]
    return "rows" if in_groups and target.type == "cuda" else None


def _device(device: object) -> torch.device:
    allowed = "a CPU or CUDA device, 'cuda' for instance"
    try:
        found = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise ArgumentError("device", arguments.shown(device), allowed) from None
    if found.type not in _FOR:
        raise ArgumentError("device", arguments.shown(device), allowed)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "torch finds no GPU here: load the program on the machine that has one, and retarget it there"
        )
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Held:
    """The weights of a layer as a state_dict spells them, and its other numbers, on the CPU; scheme: of two levels."""

    codes: Tensor
    scale: Tensor
    scheme: TensorScheme | None
    numbers: list[Tensor | None]
    k: int

    def packed(self, spec: LinearSpec) -> Tensor:
        words, w, scale = list(spec.to_ints()), self.codes, self.scale
        if self.scheme is not None:
            w, scale = weights.packed_operands(w, scale, self.scheme, self.k, words)
        bias, x_scale, x_zero_point, out_scale, out_zero_point = self.numbers
        operands = (bias, x_scale, x_zero_point, out_scale, out_zero_point)
        if spec.layout == "cpu_blocked":
            return _ops.pack_linear(w, scale, *operands, words)  # type: ignore[no-any-return]
        return rows_layout.pack(spec, w, scale, *operands)


def _layer(
    program: ExportedProgram, name: str, spec: LinearSpec, target: torch.device, layout: str | None
) -> tuple[_Held, LinearSpec]:
    """What the packed buffer `name` holds, and the spec of the same layer on the target."""
    prefix, _, _ = name.rpartition("storage")
    held: Mapping[str, Any] = {**program.state_dict, **program.constants}
    scale = held.get(prefix + state.held("weight_scale"))
    if scale is None or not name.endswith("storage"):
        raise UnsupportedError(f"the scales of '{prefix.rstrip('.') or name}' are not in the program: export it again")
    found = [held.get(prefix + state.held(key)) for key in _NUMBERS]
    numbers = [None if value is None else value.detach().cpu() for value in found]
    if not spec.has_bias:
        numbers[0] = None
    codes, scale = _codes(held[name].detach().cpu(), spec), scale.detach().cpu()
    scheme, groups = None, scale.shape[1] if scale.dim() == 2 else 0
    if spec.two_level or (groups and not spec.group_size):
        scheme = W4A8TwoLevel(spec.k // groups).weights
        codes = _four_bits(codes, scale, scheme, spec, prefix)
        is_kept = target.type == "cuda"  # GPUs multiply codes and steps themselves, CPUs take their products
        bits, size = (4, spec.k // groups) if is_kept else (8, 0)
        spec = replace(spec, w_bits=bits, group_size=size, two_level=is_kept)
    wanted = replace(spec, layout=layout or ops.layout_for(target, spec))
    if wanted.layout == rows_layout.BLOCKED and not spec.w_type.is_packed:
        wanted = replace(wanted, layout="rows")  # of 8-bit codes there is one layout
    return _Held(codes, scale, scheme, numbers, spec.k), wanted


def _four_bits(codes: Tensor, scale: Tensor, scheme: TensorScheme, spec: LinearSpec, prefix: str) -> Tensor:
    """The codes of two-level weights, of what the packed buffer holds."""
    words = list(spec.to_ints())
    four = weights.of_packed(codes, scale, scheme, words)
    if not torch.equal(weights.packed_operands(four, scale, scheme, spec.k, words)[0], codes):
        raise UnsupportedError(f"the steps of '{prefix.rstrip('.')}' are not those of W4A8TwoLevel: export it again")
    return four


def _codes(packed: Tensor, spec: LinearSpec) -> Tensor:
    if spec.layout != "cpu_blocked":
        return rows_layout.unpack(spec, packed)
    if not ops.native_available():
        why = ops.why_not_native()
        raise UnsupportedError(f"only the compiled library reads the CPU's layout of packed weights: {why}")
    return _ops.unpack_linear(packed, list(spec.to_ints()))  # type: ignore[no-any-return]
