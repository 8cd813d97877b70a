"""The one validator of layers: what it accepts, and each thing it refuses, by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import checkpoints
import pytest
import torch

from pyquant.core.presets import W4A16, W8A8
from pyquant.errors import ArgumentError
from pyquant.io import LayerRecord, check_layer
from pyquant.io.record import is_safe_name

PLAIN = checkpoints.layer("fc", W8A8(symmetric_inputs=False), 4, 8, 1, bias=torch.zeros(4))
GROUPED = checkpoints.layer("fc", W4A16(4, symmetric=False), 4, 8, 2)
STATIC_OUT = checkpoints.layer("fc", checkpoints.SCHEMES["affine codes out"], 4, 8, 3)
FLOAT = checkpoints.layer("fc", checkpoints.SCHEMES["BF16"], 4, 8, 4)


def _with(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = value
    return changed


def _scheme(**weights: Any) -> dict[str, Any]:
    scheme = W8A8().to_dict()
    return {**scheme, "weights": {**scheme["weights"], **weights}}


S = PLAIN.weight_scale
REFUSED: list[tuple[LayerRecord, dict[str, Any], str]] = [
    (PLAIN, {"name": "a\nb"}, "name"),
    (PLAIN, {"name": ".."}, "name"),
    (PLAIN, {"name": "a..b"}, "name"),
    (PLAIN, {"name": "x" * 257}, "name"),
    (PLAIN, {"name": "a\tb"}, "name"),
    (PLAIN, {"name": "__metadata__"}, "name"),
    (PLAIN, {"name": 3}, "name"),
    (PLAIN, {"scheme": 5}, "QScheme"),
    (PLAIN, {"scheme": _scheme(bits=5)}, "weights.bits"),
    (PLAIN, {"scheme": {**_scheme(), "version": 2}}, "version"),
    (PLAIN, {"scheme": {**_scheme(), "surprise": 2}}, "QScheme"),
    (PLAIN, {"kind": "conv"}, "fc.kind"),
    (PLAIN, {"kind": "embedding"}, "fc.kind"),
    (PLAIN, {"activation": "tanh"}, "fc.activation"),
    (PLAIN, {"activation": None}, "fc.activation"),
    (PLAIN, {"clamp": (0.0, 1.0)}, "fc.clamp"),
    (PLAIN, {"activation": "clamp"}, "fc.clamp"),
    (PLAIN, {"activation": "clamp", "clamp": (1.0, 0.0)}, "fc.clamp"),
    (PLAIN, {"activation": "clamp", "clamp": (float("nan"), 0.0)}, "fc.clamp"),
    (PLAIN, {"activation": "clamp", "clamp": (0, 1)}, "fc.clamp"),
    (PLAIN, {"activation": "clamp", "clamp": [0.0, 1.0]}, "fc.clamp"),
    (PLAIN, {"in_features": -1}, "fc.in_features"),
    (PLAIN, {"in_features": 8.0}, "fc.in_features"),
    (PLAIN, {"in_features": True}, "fc.in_features"),
    (PLAIN, {"in_features": 2**31}, "fc.in_features"),
    (PLAIN, {"in_features": 9}, "fc.codes"),
    (PLAIN, {"out_features": 5}, "fc.codes"),
    (PLAIN, {"in_features": 66312, "codes": torch.zeros(4, 66312, dtype=torch.int8)}, "fc.in_features"),
    (PLAIN, {"codes": None}, "fc.codes"),
    (PLAIN, {"codes": PLAIN.codes.to(torch.int16)}, "fc.codes"),
    (PLAIN, {"codes": PLAIN.codes.view(torch.uint8)}, "fc.codes"),
    (PLAIN, {"codes": PLAIN.codes.reshape(2, 16)}, "fc.codes"),
    (PLAIN, {"codes": PLAIN.codes.to("meta")}, "fc.codes"),
    (PLAIN, {"codes": _with(PLAIN.codes, -128)}, "fc.codes"),
    (GROUPED, {"codes": _with(GROUPED.codes, 8)}, "fc.codes"),
    (GROUPED, {"codes": _with(GROUPED.codes, -9)}, "fc.codes"),
    (GROUPED, {"scheme": W4A16(3, symmetric=False).to_dict()}, "fc.group_size"),
    (GROUPED, {"weight_scale": GROUPED.weight_scale[:, :1]}, "fc.weight_scale"),
    (GROUPED, {"weight_zero_point": None}, "fc.weight_zero_point"),
    (GROUPED, {"weight_zero_point": _with(GROUPED.weight_zero_point, 8)}, "fc.weight_zero_point"),
    (GROUPED, {"weight_zero_point": GROUPED.weight_zero_point.to(torch.int8)}, "fc.weight_zero_point"),
    (PLAIN, {"weight_zero_point": torch.zeros(4, dtype=torch.int32)}, "fc.weight_zero_point"),
    (PLAIN, {"weight_scale": None}, "fc.weight_scale"),
    (PLAIN, {"weight_scale": S.double()}, "fc.weight_scale"),
    (PLAIN, {"weight_scale": S.reshape(4, 1)}, "fc.weight_scale"),
    (PLAIN, {"weight_scale": _with(S, 0.0)}, "fc.weight_scale"),
    (PLAIN, {"weight_scale": _with(S, -1.0)}, "fc.weight_scale"),
    (PLAIN, {"weight_scale": _with(S, float("nan"))}, "fc.weight_scale"),
    (PLAIN, {"weight_scale": _with(S, float("inf"))}, "fc.weight_scale"),
    (PLAIN, {"input_scale": None}, "fc.input_scale"),
    (PLAIN, {"input_scale": torch.tensor(1.0)}, "fc.input_scale"),
    (PLAIN, {"input_scale": torch.tensor([float("nan")])}, "fc.input_scale"),
    (PLAIN, {"input_zero_point": None}, "fc.input_zero_point"),
    (PLAIN, {"input_zero_point": torch.tensor([128], dtype=torch.int32)}, "fc.input_zero_point"),
    (PLAIN, {"output_scale": torch.ones(1)}, "fc.output_scale"),
    (PLAIN, {"output_zero_point": torch.zeros(1, dtype=torch.int32)}, "fc.output_zero_point"),
    (STATIC_OUT, {"output_scale": None}, "fc.output_scale"),
    (STATIC_OUT, {"output_zero_point": torch.tensor([-129], dtype=torch.int32)}, "fc.output_zero_point"),
    (STATIC_OUT, {"input_zero_point": torch.zeros(1, dtype=torch.int32)}, "fc.input_zero_point"),
    (PLAIN, {"bias": torch.zeros(5)}, "fc.bias"),
    (PLAIN, {"bias": torch.zeros(4, dtype=torch.int32)}, "fc.bias"),
    (PLAIN, {"bias": torch.zeros(4).to_sparse()}, "fc.bias"),
    (FLOAT, {"codes": FLOAT.codes.half()}, "fc.codes"),
    (FLOAT, {"weight_scale": torch.ones(4)}, "fc.weight_scale"),
]


@pytest.mark.parametrize(("base", "changes", "argument"), REFUSED, ids=range(len(REFUSED)))
def test_check_layer_refuses_and_names_the_field(base: LayerRecord, changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^argument '{re.escape(argument)}'"):
        check_layer(replace(base, **changes))


@pytest.mark.parametrize("name", checkpoints.SCHEMES)
@pytest.mark.parametrize(("n", "k"), [(4, 16), (1, 8), (0, 8), (4, 0)])
def test_check_layer_accepts_every_scheme(name: str, n: int, k: int) -> None:
    scheme = checkpoints.SCHEMES[name]
    entry = check_layer(checkpoints.layer("a.b", scheme, n, k, 7))
    assert (entry.scheme, entry.out_features, entry.in_features) == (scheme, n, k)


def test_the_largest_allowed_k_is_accepted() -> None:
    check_layer(checkpoints.layer("fc", W8A8(symmetric_inputs=False), 1, 66311, 1))


@pytest.mark.parametrize(
    "name", ["", "a\tb", "a\n", "a\0", "\x7f", "\u200b", "\ud800", "..", "a/../b", "__metadata__", "x" * 257]
)
def test_unsafe_names(name: str) -> None:
    assert not is_safe_name(name)
