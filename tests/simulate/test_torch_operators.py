"""Other people's exporters see quantisation in pyquant's own models: torch's operators, constants, and no others."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from qat_models import draw, mlp
from torch import Tensor, nn

import pyquant
from pyquant import W4A4, W4A8, W8A8, QScheme, QuantizationCalibrator, SelectiveQuantizer, W8A8Dynamic
from pyquant.integrations.pytorch_quantization import TensorQuantizer
from pyquant.simulate import torch_operators


def images() -> Tensor:
    return draw("export").normal(2, 3, 6, 6)


def simulated(scheme: QScheme, x: Tensor, **words: object) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).eval()
    model = SelectiveQuantizer(scheme=scheme, verbose=False, **words).quantize_module(net)
    QuantizationCalibrator().calibrate_model(model, [x] * 4, num_calib_batches=4)
    return model


CASES = {
    "W8A8": (W8A8(), {}),
    "affine inputs": (W8A8(symmetric_inputs=False), {}),
    "calibrated weights": (W8A8(), {"default_quant_modules_calibrator_weights": "mse"}),
    "per tensor": (W8A8(), {"default_per_channel_quant_weights": False}),
    "per tensor, calibrated": (
        W8A8(),
        {"default_per_channel_quant_weights": False, "default_quant_modules_calibrator_weights": "mse"},
    ),
    "groups": (W4A8(9), {}),
    "4 bits": (W4A4(), {}),
    "dynamic": (W8A8Dynamic(), {}),
    "dynamic affine": (W8A8Dynamic(symmetric_inputs=False), {}),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_trace_is_made_of_torch_operators(case: str, training: bool) -> None:
    x, (scheme, words) = images(), CASES[case]
    model = simulated(scheme, x, **words)
    if training:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pyquant.QATWarning)
            pyquant.prepare_qat_(model, learn_amax=True)
    want = model(x).detach()
    with pyquant.torch_fake_quantize(), warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, x)  # with its check, which runs the model and traces it once more
    graph = str(traced.inlined_graph)
    assert graph.count("aten::fake_quantize_per") == 4
    assert "pyquant::" not in graph
    assert torch.equal(model(x).detach(), want)  # the switch is off again
    again = torch.jit.load(io.BytesIO(traced.save_to_buffer()))
    other = draw("other").normal(2, 3, 6, 6)
    # a few codes at ties, and -128 where pyquant clips at -127; -8 for -7 at the ends of 4-bit ranges that clip
    limit = (0.02 if scheme.weights.bits == 8 else 0.05) * want.abs().max()
    for data in (x, other):
        assert (again(data) - model(data)).abs().max() <= limit


@pytest.mark.parametrize("case", ["W8A8", "affine inputs", "4 bits", "dynamic"])
def test_an_exported_program_is_made_of_torch_operators(case: str) -> None:
    x, (scheme, words) = images(), CASES[case]
    model = simulated(scheme, x, **words)
    with pyquant.torch_fake_quantize():
        program = torch.export.export(model, (x,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("fake_quantize_per" in t for t in targets) == 4
    assert not any("pyquant" in t for t in targets)


def test_integer_forward_exports_its_simulation() -> None:
    x = draw("int8").normal(4, 32)
    model = pyquant.prepare_qat_(mlp(), W8A8Dynamic(), forward="int8").eval()
    with pyquant.torch_fake_quantize():
        graph = str(torch.jit.trace(model, x).inlined_graph)
    assert graph.count("aten::fake_quantize_per_channel_affine") == 4
    assert "pyquant::" not in graph


def test_the_original_switch_is_this_switch() -> None:
    x = images()
    model = simulated(W8A8(), x)
    TensorQuantizer.use_fb_fake_quant = True
    try:
        assert torch_operators.are_chosen()
        assert "aten::fake_quantize_per_tensor_affine" in str(torch.jit.trace(model, x).inlined_graph)
    finally:
        TensorQuantizer.use_fb_fake_quant = False
    assert not torch_operators.are_chosen()
    with pyquant.torch_fake_quantize():
        assert TensorQuantizer.use_fb_fake_quant is True
    with pytest.raises(KeyboardInterrupt), pyquant.torch_fake_quantize():
        raise KeyboardInterrupt
    assert not TensorQuantizer.use_fb_fake_quant


def test_onnx_has_quantize_and_dequantize_with_constant_scales(tmp_path) -> None:
    onnx = pytest.importorskip("onnx")
    x = images()
    model = simulated(W8A8(), x)
    with pyquant.torch_fake_quantize():
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=False, opset_version=17)
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node if node.op_type != "Constant"]
    pair = ["QuantizeLinear", "DequantizeLinear"]
    assert kinds == [*pair, *pair, "Conv", "Relu", "Flatten", *pair, *pair, "Gemm"]
