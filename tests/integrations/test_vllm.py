"""What of pyquant.integrations.vllm needs no vLLM. In its layers and engine: tests/integrations/vllm (make nightly)."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import importlib.util
import os
import pickle
import re
import subprocess
import sys
from typing import Any

import accept
import pytest
import torch
from qlayers import calibration

import pyquant
from pyquant import W4A8, W4A16, W8A8, QLinear, QScheme, W4A8Dynamic, W8A8Dynamic
from pyquant.integrations.vllm import tally
from pyquant.integrations.vllm.product import Inputs, Product, Weights, input_scheme, unpacked
from pyquant.io.compressed_tensors import pack_to_int32

K = 64
SCHEMES = [
    W8A8Dynamic(),
    W8A8(),
    W8A8(symmetric_inputs=False),
    dataclasses.replace(W8A8(), weights=pyquant.TensorScheme()),
    W4A8Dynamic(32),
    W4A8(16, symmetric_inputs=False),
    W4A16(16, symmetric=False),
    W4A16(None),
]


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYQUANT_VLLM"} | variables
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_nothing_happens() -> None:
    program = "import sys; from pyquant.integrations import vllm; vllm.register(); print('vllm' in sys.modules)"
    ran = run(f"{program}; from pyquant.integrations.vllm import PyquantConfig")
    assert ran.stdout == "False\n", ran.stderr
    assert re.search("ModuleNotFoundError: No module named '(vllm|compressed_tensors)'", ran.stderr)  # its requirement


def test_another_word_in_the_variable_is_an_error_that_says_which_are_allowed() -> None:
    program = "import os; from pyquant.integrations import vllm; vllm.register(); print('off is allowed', flush=True); "
    ran = run(f"{program} os.environ['PYQUANT_VLLM'] = 'first'; vllm.register()", PYQUANT_VLLM="off")
    assert ran.stdout == "off is allowed\n", ran.stderr
    assert "argument 'PYQUANT_VLLM': got 'first'; allowed: last, prefer, off" in ran.stderr


def test_the_installed_package_names_the_entry_point() -> None:
    found = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "pyquant"]
    if not found and not list(importlib.metadata.distributions(name="pyquant-gemm")):
        pytest.skip("pyquant is not installed, only on the path")
    from pyquant.integrations import vllm

    assert [e.load() for e in found] == [vllm.register]


def layers_of(scheme: QScheme, rows: tuple[int, ...], spread: bool = False, bias: bool = True) -> list[QLinear]:
    torch.manual_seed(5)
    made = []
    for i, n in enumerate(rows):
        numbers = calibration(scheme)
        if spread:
            numbers["input_scale"] *= 1 + i / 8
        made.append(QLinear.from_float(torch.nn.Linear(K, n, bias=bias), scheme, **numbers))
    return made


def product_of(layers: list[QLinear], bias: torch.Tensor | None = None, **changes: Any) -> Product:
    scheme = layers[0].scheme
    by_tensor = scheme.weights.granularity == "per_tensor"

    def joined(name: str) -> torch.Tensor | None:
        found = [getattr(layer, name) for layer in layers]
        if found[0] is None:
            return None
        if by_tensor or "input" in name:
            return torch.cat([t.reshape(-1)[:1] for t in found])
        return torch.cat([t.reshape(len(t), -1) for t in found])

    weights = Weights(
        scheme.weights.bits,
        torch.cat([layer.codes for layer in layers]),
        joined("weight_scale"),  # type: ignore[arg-type]
        joined("weight_zero_point"),
        [layer.out_features for layer in layers],
    )
    x = scheme.inputs
    inputs = None
    if x is not None:
        told = input_scheme(x.bits, x.symmetric, x.dynamic, x.narrow_range)
        inputs = Inputs(told, joined("input_scale"), joined("input_zero_point"))
    return Product(dataclasses.replace(weights, **changes), inputs, bias, torch.float32, "a.b")


def rows_of_x() -> torch.Tensor:
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(2)) * 3
    x[1] *= 100  # beyond every static range
    return x


@pytest.mark.parametrize(
    ("scheme", "spread"),
    [
        (scheme, spread)
        for scheme in SCHEMES
        for spread in (False, True)
        if not spread or (scheme.inputs is not None and not scheme.inputs.dynamic)
    ],
    ids=str,
)
def test_a_product_is_its_layers_side_by_side(scheme: QScheme, spread: bool) -> None:
    layers = layers_of(scheme, (40, 24, 8), spread)
    product = product_of(layers, torch.cat([layer.bias_ for layer in layers]))
    x = rows_of_x()
    accept.t1(product(x, torch.zeros(72)), torch.cat([layer(x) for layer in layers], -1))
    assert len(product.parts) == (3 if spread else 1)


def test_a_bias_is_added_once() -> None:
    (layer,) = layers_of(W8A8Dynamic(), (24,))
    x, alone = rows_of_x(), product_of([layer])
    accept.t1(alone(x, layer.bias_), alone(x) + layer.bias_)
    accept.t1(product_of([layer], layer.bias_)(x, layer.bias_), layer(x))
    with pytest.raises(pyquant.ArgumentError, match="'bias': got None"):
        product_of([layer], layer.bias_)(x)


def test_rows_that_fill_up_a_head_have_no_scale_and_are_zero() -> None:
    (layer,) = layers_of(W8A8Dynamic(), (24,), bias=False)
    codes, scale = torch.zeros(32, K, dtype=torch.int8), torch.zeros(32, 1)
    codes[:24], codes[24:], scale[:24] = layer.codes, -8, layer.weight_scale[:, None]
    y = product_of([layer], codes=codes, scale=scale, widths=[32])(rows_of_x())
    accept.t1(y[:, :24].contiguous(), layer(rows_of_x()))
    assert not y[:, 24:].any()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "widths": ({"widths": [20]}, r"'widths': got \[20\]; allowed: rows of matrices that are 24 together"),
    "scale": ({"scale": torch.full((24, 1), float("nan"))}, "weight_scale.*was it in the checkpoint"),
    "groups": ({"scale": torch.ones(24, 3)}, "3 groups; allowed: a divisor of K = 64"),
    "affine": ({"zero_point": torch.ones(24, 1, dtype=torch.int32)}, "zero points of weights whose inputs"),
    "parts": ({"scale": torch.ones(2)}, r"weight_scale.*\[2\]; allowed: \[N, groups\] or \[1\]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_numbers_that_no_layer_can_hold_are_refused_by_the_name_of_the_layer(what: str) -> None:
    changes, told = WRONG[what]
    with pytest.raises(pyquant.CheckpointError, match=rf"^layer 'a\.b': .*{told}"):
        product_of(layers_of(W8A8Dynamic(), (24,)), **changes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("packed_dim", [0, 1])
@pytest.mark.parametrize("output_dim", [0, 1])
def test_unpacking_takes_every_orientation_that_vllm_has(bits: int, packed_dim: int, output_dim: int) -> None:
    """[outputs, inputs] packed along either, stored either way round: compressed-tensors, GPTQ, zero points, AWQ."""
    low = -(2 ** (bits - 1))
    codes = torch.randint(low, -low, (16, 24), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    along_inputs = packed_dim != output_dim
    words = pack_to_int32(codes if along_inputs else codes.T.contiguous(), bits)  # packed along its columns

    class Parameter:
        data = words if packed_dim == 1 else words.T

    Parameter.packed_dim, Parameter.output_dim = packed_dim, output_dim  # type: ignore[attr-defined]
    accept.t0(unpacked(Parameter, bits).contiguous(), codes)


TOLD: list[list[str]] = []


def tell(layers: tally.Layers) -> None:
    TOLD.append([name for name, _ in layers])


def test_a_tally_tells_once_when_the_last_layer_was_packed() -> None:
    TOLD.clear()
    one, (packed, other, plain) = tally.Tally(tell), [torch.nn.Linear(2, 2) for _ in range(3)]
    gone = torch.nn.Linear(2, 2)
    for name, layer, ours in [("a", packed, True), ("b", plain, False), ("c", other, True), ("d", gone, True)]:
        one.asked(name, layer, will_be_packed=ours)
    del gone, layer  # a head that was tied: it is never packed
    copies = [copy.deepcopy(one), pickle.loads(pickle.dumps(one))]  # vLLM sends its quantisation to its workers
    tally.packed(packed)
    tally.packed(packed)
    tally.packed(plain)
    assert TOLD == []
    tally.packed(other)
    assert TOLD == [["a", "b", "c"]]
    for number, again in enumerate(copies):
        layer = torch.nn.Linear(2, 2)
        again.asked(f"of {number}", layer, will_be_packed=True)
        tally.packed(layer)
    assert TOLD[1:] == [["of 0"], ["of 1"]]
