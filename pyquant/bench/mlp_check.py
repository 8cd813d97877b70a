"""Every layer of every configuration against its one right answer, before anything is timed.

The configurations form a tree: those that begin alike share their first layers. Each node runs a real layer on what
the layer before it really gave, and compares some rows with a float64 reference that is exact for integer layers (all
scales are powers of two): their codes, and their floats after one rounding, must be equal bit for bit. A float layer
must be within the bound of float32 sums; the first one has whole numbers as inputs, which float32 sums exactly, and
must be equal too on a CPU, so that all formats agree there (torch's products on a GPU may round parts of a sum to 16
bits). The callable that is timed must then give the bits of the last node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from pyquant.bench.mlp_net import FLOAT, LARGEST, Config, Joint, MlpNet, Value, all_joints, joints
from pyquant.core.qtensor import PackedQTensor, QTensor
from pyquant.errors import PyquantError
from pyquant.nn.linear_call import unpacked

ROWS: Final = 8
_CHUNK_BYTES: Final = 256 << 20  # of float64 weights at a time
_SUM_EXACT: Final = 2**24


def check_net(net: MlpNet, configs: Sequence[Config], on_config: Callable[[Config], None] = lambda _: None) -> int:
    """Check all layers that the configurations use, in their places. -> how many layer results were compared.

    on_config  called with every configuration that was checked.
    Raises PyquantError naming the layer, its formats and the first output that is wrong.
    """
    rows = torch.linspace(0, net.batch - 1, min(ROWS, net.batch), device=net.device).round().long().unique()
    with torch.inference_mode():
        checked = _ready_calls(net, configs, rows)
        return checked + _descend(net, list(configs), rows, 0, net.x, on_config)


def _descend(
    net: MlpNet,
    configs: list[Config],
    rows: Tensor,
    depth: int,
    x: Value,
    on_config: Callable[[Config], None],
) -> int:
    """All configurations with this prefix; x is what layer `depth` gets."""
    checked = 0
    if depth == net.layers:
        for config in configs:
            _same_bits(net.forward(config)(), x, config)
            on_config(config)
        return 0
    for own in dict.fromkeys(config[depth] for config in configs):
        mine = [config for config in configs if config[depth] == own]
        for after in dict.fromkeys(config[depth + 1] if depth + 1 < net.layers else FLOAT for config in mine):
            below = [c for c in mine if depth + 1 == net.layers or c[depth + 1] == after]
            joint = Joint(depth, own, after, not isinstance(x, QTensor))
            y = net.layer(joint)(x)
            compare(net, joint, x, y, rows)
            checked += 1 + _descend(net, below, rows, depth + 1, y, on_config)
    return checked


def _ready_calls(net: MlpNet, configs: Sequence[Config], rows: Tensor) -> int:
    """The products on ready inputs, which are timed by themselves."""
    used = {(joint.layer, joint.own, joint.after) for config in configs for joint in joints(config)}
    ready = [j for j in all_joints(net.layers, from_float=False) if (j.layer, j.own, j.after) in used]
    for joint in ready:
        y, scale = net.product(joint)(), net.layer(joint).output_scale
        codes = PackedQTensor if y.dtype == torch.uint8 else QTensor
        compare(net, joint, net.ready[joint.layer, joint.own], y if scale is None else codes(y, scale), rows)
    return len(ready)


def compare(net: MlpNet, joint: Joint, x: Value, y: Value, rows: Tensor) -> None:
    """Some rows of one layer's result with the reference. Raises PyquantError."""
    x, y = (unpacked(value) if isinstance(value, QTensor) else value for value in (x, y))
    sums, bound = _reference(net, joint, x, rows)
    gives_codes = joint.own != FLOAT and joint.after != FLOAT
    if isinstance(y, QTensor) != gives_codes:
        raise PyquantError(f"{joint.name}: gave {'codes' if isinstance(y, QTensor) else 'floats'}")
    got = (y.data if isinstance(y, QTensor) else y)[rows]
    if isinstance(y, QTensor):
        scheme = net.input_scheme(joint.after)
        low, high = (-127, 127) if scheme is None else scheme.code_range
        expected = (sums / y.scale.double()).round().clamp(low, high).to(torch.int8)
    else:
        expected = sums.to(torch.float32).to(net.float_type)
    if bound is None:
        wrong = got != expected
    else:  # and half a unit of the 16-bit result
        rounding = torch.finfo(net.float_type).eps / 2
        wrong = ~((got.double() - sums).abs() <= bound + rounding * (sums.abs() + bound))
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise PyquantError(
            f"{joint.name}: {int(wrong.sum())} of {wrong.numel()} outputs are wrong; row {int(rows[row])}, "
            f"output {column}: {got[row, column].item()}, expected {expected[row, column].item()}"
        )


def _reference(net: MlpNet, joint: Joint, x: Value, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """float64 sums of some rows, and how far a float layer may be from them; None: not at all."""
    if isinstance(x, QTensor):
        inputs = x.data[rows].double() * x.scale.double()
    elif joint.own == FLOAT:
        inputs = x[rows].double()
    else:  # floats that an integer layer quantises under its own scale
        scheme, scale = net.input_scheme(joint.own), net.layer(joint).input_scale
        if scheme is None or scale is None:
            raise PyquantError(f"{joint.name}: an integer layer without an input scale")
        low, high = scheme.code_range
        inputs = (x[rows].double() / scale.double()).round().clamp(low, high) * scale.double()
    k, step = net.sizes[joint.layer], 2.0 ** -net.exponents[joint.layer]
    sums, magnitudes = _product(inputs, net.weights[joint.layer], step)
    whole = joint.layer == 0 and net.device.type == "cpu" and float(inputs.abs().max()) * LARGEST * k < _SUM_EXACT
    if joint.own != FLOAT or whole:
        return sums, None
    return sums, magnitudes * k * 2.0**-24


def _product(inputs: Tensor, codes: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """inputs @ (codes x step).T, and the same of magnitudes, in pieces of the weights."""
    per = max(1, _CHUNK_BYTES // (8 * codes.shape[1]))
    sums, magnitudes = [], []
    for part in codes.split(per):
        weights = part.double() * step
        sums.append(inputs @ weights.T)
        magnitudes.append(inputs.abs() @ weights.abs().T)
    return torch.cat(sums, 1), torch.cat(magnitudes, 1)


def _same_bits(got: Value, expected: Value, config: Config) -> None:
    if isinstance(got, QTensor) or isinstance(expected, QTensor) or not torch.equal(got, expected):
        raise PyquantError(f"{','.join(config)}: the timed network does not give what its checked layers give")
