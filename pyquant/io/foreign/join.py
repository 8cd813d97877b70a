"""Two layers of a file that are one of the model, gate and up of an expert: row under row, every weight as it was."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyquant.core.scheme import QScheme
from pyquant.errors import CheckpointError
from pyquant.io.foreign.record import ForeignLayer
from pyquant.io.record import LayerRecord


def joined(name: str, gate: ForeignLayer, up: ForeignLayer, *, interleaved: bool = False) -> ForeignLayer:
    """The layer `name` whose rows are those of `gate`, then those of `up`; interleaved: one of each by turns.

    Raises CheckpointError naming both layers, and what of them no single product can have.
    """
    one, other = gate.record, up.record
    schemes = QScheme.from_dict(one.scheme), QScheme.from_dict(other.scheme)
    scales = [_by_groups(record, record.weight_scale) for record in (one, other)]
    groups = max(scale.shape[1] for scale in scales)
    differences = {
        "sizes": _sizes(one) != _sizes(other),
        "bits": schemes[0].weights.bits != schemes[1].weights.bits,
        "groups": any(scale.shape[1] not in (1, groups) for scale in scales),
        "ways of quantising activations": schemes[0].inputs != schemes[1].inputs,
        "input scales": not _same(one.input_scale, other.input_scale),
        "input zero points": not _same(one.input_zero_point, other.input_zero_point),
        "orders of columns": not _same(gate.order, up.order),
        "biases (one has none)": (one.bias is None) != (other.bias is None),
    }
    if what := next((what for what, differs in differences.items() if differs), ""):
        static = what.startswith("input")
        hint = "; activations='float' takes the same weights" if static or "activations" in what else ""
        raise CheckpointError(
            f"layers '{one.name}' and '{other.name}' are one product of the model, '{name}': different {what}; "
            f"allowed: the same in both{hint}"
        )

    def rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack([a, b], 1).flatten(0, 1) if interleaved else torch.cat([a, b])

    points = [record.weight_zero_point for record in (one, other)]
    has_points = any(point is not None for point in points)
    granularity = "per_channel" if groups == 1 else "per_group"
    weights = replace(
        schemes[0].weights,
        symmetric=not has_points,
        granularity=granularity,
        group_size=None if groups == 1 else one.in_features // groups,
    )
    shape = weights.scale_shape((2 * one.out_features, one.in_features))
    zero_point = None
    if has_points:
        filled = [
            torch.zeros(record.out_features, groups, dtype=torch.int32, device="cpu")
            if point is None
            else _by_groups(record, point)
            for record, point in zip((one, other), points, strict=True)
        ]
        zero_point = rows(*(point.expand(-1, groups) for point in filled)).reshape(shape)
    record = replace(
        one,
        name=name,
        scheme=replace(schemes[0], weights=weights).to_dict(),
        out_features=2 * one.out_features,
        codes=rows(one.codes, other.codes),
        weight_scale=rows(*(scale.expand(-1, groups) for scale in scales)).reshape(shape),
        weight_zero_point=zero_point,
        bias=None if one.bias is None or other.bias is None else rows(one.bias, other.bias),
    )
    return ForeignLayer(record, gate.order)


def _by_groups(record: LayerRecord, numbers: torch.Tensor | None) -> torch.Tensor:
    """Numbers of a layer, [1], [N] or [N, G], as [N, G]."""
    if numbers is None:
        raise CheckpointError(f"layer '{record.name}': no scales; allowed: codes with scales")
    return numbers.reshape(-1, 1).expand(record.out_features, 1) if numbers.dim() == 1 else numbers


def _sizes(record: LayerRecord) -> tuple[int, int]:
    return record.out_features, record.in_features


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
