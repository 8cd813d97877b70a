"""The old names: SuperGradients' and pytorch_quantization's, and that they do what they did, minus the defects."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pyquant
from pyquant.compat import pytorch_quantization as quant_nn
from pyquant.compat import super_gradients as sg
from pyquant.errors import ArgumentError, PyquantError
from pyquant.integrations.pytorch_quantization import QuantDescriptor, TensorQuantizer


def test_names_are_those_of_the_package() -> None:
    assert sg.SelectiveQuantizer is pyquant.SelectiveQuantizer
    assert sg.QuantizationCalibrator is pyquant.QuantizationCalibrator
    assert all(hasattr(sg, name) for name in sg.__all__)
    assert {"QuantResidual", "SkipQuantization", "QuantizedMapping", "ptq"} <= set(sg.__all__)


def test_ptq_returns_a_new_calibrated_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())
    data = [torch.randn(8, 4) for _ in range(3)]
    found = sg.ptq(model, None, data, calibration_method="max", calibration_batches=3)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    expected = found(data[0])
    torch.testing.assert_close(pyquant.convert_(found)(data[0]), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="calibration_loader"):
        sg.ptq(model)


def test_quant_residual_takes_the_method_of_the_calibration() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.residual = nn.Linear(4, 4), sg.QuantResidual()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.residual(x) + self.fc(x)

    model = pyquant.SelectiveQuantizer().quantize_module(nn.Sequential(Residual()))
    x = torch.linspace(-1, 1, 4000).view(1000, 4)
    ranges = pyquant.QuantizationCalibrator().calibrate_model(model, [x], "percentile", 1, 50.0)
    assert ranges["0.residual.input"].amax.item() == pytest.approx(0.5, rel=0.01)
    assert ranges["0.fc.input"].amax.item() == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"num_bits": 9}, "bits"),
        ({"axis": 1}, "axis"),
        ({"axis": (0, 1)}, "axis"),
        ({"unsigned": True}, "unsigned"),
        ({"calib_method": "average"}, "calib_method"),
    ],
)
def test_descriptors_refuse_what_has_no_counterpart(words: dict, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        QuantDescriptor(**words)


def test_descriptors_become_schemes() -> None:
    assert QuantDescriptor(axis=(0,)).tensor_scheme()[0].granularity == "per_channel"
    scheme, is_open = QuantDescriptor(calib_method="histogram", narrow_range=False).tensor_scheme()
    assert is_open
    assert scheme.code_range == (-128, 127)


def test_tensor_quantizer_collects_then_quantises() -> None:
    x = torch.linspace(-2, 2, 1001)
    quantizer = TensorQuantizer(QuantDescriptor(calib_method="histogram"))
    with pytest.raises(PyquantError, match="not calibrated"):
        quantizer(x)
    quantizer.enable_calib()
    assert quantizer(x) is x
    quantizer.disable_calib()
    quantizer.load_calib_amax("percentile", 50.0)
    assert quantizer.amax.item() == pytest.approx(1.0, rel=0.01)
    assert quantizer(x).abs().max().item() == pytest.approx(quantizer.amax.item())
    quantizer.disable()
    assert quantizer(x) is x
    quantizer.enable()
    quantizer.amax = 2.0
    assert quantizer(x).abs().max().item() == pytest.approx(2.0)


def test_the_export_switch_uses_torch_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = TensorQuantizer(QuantDescriptor(amax=2.0))
    x = torch.linspace(-3, 3, 1001)
    ours = quantizer(x)
    monkeypatch.setattr(quant_nn.TensorQuantizer, "use_fb_fake_quant", True)
    exported = torch.jit.trace(quantizer, x)
    assert "fake_quantize_per_tensor_affine" in str(exported.graph)
    assert (quantizer(x) - ours).abs().max() <= 2.0 / 127 * 1.001  # a code at most where rounding is a tie
    assert quantizer(x).max() == ours.max()
    assert quantizer(x).min() == pytest.approx(ours.min() * 128 / 127)  # codes to -128, as those of ONNX


def test_calibrators_have_their_names() -> None:
    calibrator = quant_nn.calib.HistogramCalibrator()
    calibrator.collect(torch.linspace(-1, 1, 10001))
    assert calibrator.compute_amax("percentile", percentile=90).item() == pytest.approx(0.9, rel=0.01)
    largest = quant_nn.calib.MaxCalibrator()
    largest.collect(torch.tensor([1.0, -3.0]))
    assert largest.compute_amax().item() == 3.0
