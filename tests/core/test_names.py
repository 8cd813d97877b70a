"""The closed lists of names against what else counts them: the C++ enums, the tables of functions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch

from pyquant.core import names
from pyquant.core.dtypes import FLOATS_BY_NAME, QDTYPES, dtype_name
from pyquant.mixed_precision.loss.metrics import OUTPUT_METRICS
from pyquant.numerics.activation import ACTIVATIONS

ROOT = Path(__file__).resolve().parents[2]


def enum(header: str, name: str) -> dict[str, int]:
    """The enumerators of a C++ enum class and their numbers."""
    text = (ROOT / "csrc/core" / header).read_text()
    (body,) = re.findall(rf"enum class {name} : int32_t {{([^}}]*)}};", text)
    return {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", body)}


def test_activations_are_numbered_as_in_cpp_and_have_their_functions() -> None:
    text = (ROOT / "csrc/core/activation_math.h").read_text()
    (body,) = re.findall(r"#define PYQUANT_ACTIVATIONS\(X\) (.*)", text)
    assert tuple(re.findall(r"X\((\w+)\)", body)) == names.ACTIVATIONS == tuple(ACTIVATIONS)


def test_the_functions_of_an_activation_are_one_function() -> None:
    """What training differentiates, what dequantize_ builds and what the kernels compute, at limits of (-1, 2)."""
    t = torch.linspace(-4.0, 4.0, 1001)
    for name, entry in ACTIVATIONS.items():
        limits = entry.limits(-1.0, 2.0)
        x = t.clone().requires_grad_()
        want = entry.plain(x, *limits)
        want.sum().backward()
        torch.testing.assert_close(entry.formula(t, *limits), want.detach(), rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(entry.module(*limits)(t), want.detach(), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(entry.gradient(torch.ones_like(t), t, *limits), x.grad, rtol=0, atol=0, msg=name)


def test_granularities_are_those_of_cpp() -> None:
    kinds = {"per_tensor": "tensor", "per_token": "rows", "per_channel": "rows", "per_group": "groups"}
    assert tuple(kinds) == names.GRANULARITIES
    assert tuple(dict.fromkeys(kinds.values())) == tuple(enum("dtype.h", "Granularity"))


def test_types_are_those_of_cpp() -> None:
    floats = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    assert tuple(floats) == names.FLOAT_DTYPES == tuple(map(dtype_name, FLOATS_BY_NAME.values()))
    assert set(names.HALF_DTYPES) < set(names.FLOAT_DTYPES)
    assert {*floats.values(), *(t.native_name for t in QDTYPES.values()), "s32"} == set(enum("dtype.h", "DType"))


def test_every_output_metric_has_its_function() -> None:
    assert tuple(OUTPUT_METRICS) == names.OUTPUT_METRICS


def test_no_list_stands_a_second_time() -> None:
    lists = {v: k for k, v in vars(names).items() if k.isupper() and isinstance(v, tuple)}
    again = []
    for path in sorted((ROOT / "pyquant").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Tuple) and all(isinstance(e, ast.Constant) for e in node.elts):
                name = lists.get(tuple(e.value for e in node.elts))  # type: ignore[attr-defined]
                if name is not None and path.name != "names.py":
                    again.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not again, "\n".join(again)
