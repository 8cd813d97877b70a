"""QuantizationCalibrator: exactly N batches, which method governs what, compare, and a model that is left as it was."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from blocks import Net, batches, is_unchanged, snapshot

import pyquant
from pyquant import QuantizationCalibrator, SelectiveQuantizer, convert_
from pyquant.calibrate import range_to_qparams, weight_range
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, NonFiniteError, PyquantError
from pyquant.nn.qlinear import QLinear


def prepared(**options: Any) -> Net:
    return SelectiveQuantizer(**options).quantize_module(Net().eval())  # type: ignore[return-value]


def amax(model: nn.Module, name: str) -> float:
    return float(model.get_submodule(name).input_fake_quant.scale) * 127


class Counted:
    """An endless stream that knows how many batches were taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.taken += 1
            yield torch.full((2, 6), float(self.taken))


@pytest.mark.parametrize("count", [1, 3, 16])
def test_exactly_so_many_batches(count: int) -> None:
    model, data, calls = prepared(), Counted(), []
    model.stem.register_forward_hook(lambda *a: calls.append(1))
    QuantizationCalibrator().calibrate_model(model, data, "max", count)
    assert (data.taken, len(calls)) == (count, count)
    assert amax(model, "stem") == pytest.approx(count)  # the next batch would have been larger


def test_the_default_is_sixteen_and_too_few_is_an_error() -> None:
    model, data = prepared(), Counted()
    QuantizationCalibrator().calibrate_model(model, data)
    assert data.taken == 16
    model = prepared()
    before = snapshot(model)
    with pytest.raises(PyquantError, match=r"16 .*15"):
        QuantizationCalibrator().calibrate_model(model, batches(15))
    assert is_unchanged(model, before)


def test_the_call_of_the_guide_in_any_order_of_keywords() -> None:
    model = prepared()
    QuantizationCalibrator().calibrate_model(
        model, method="percentile", calib_data_loader=batches(16), num_calib_batches=16, percentile=99.99
    )
    convert_(model)
    assert isinstance(model.stem, QLinear)
    found = {n: p.default for n, p in inspect.signature(QuantizationCalibrator().calibrate_model).parameters.items()}
    assert (found["method"], found["num_calib_batches"], found["percentile"]) == ("percentile", 16, 99.99)
    assert (found["batch_to_inputs"], found["verbose"]) == (None, False)


@pytest.mark.parametrize("method", ["max", "percentile", "entropy", "mse"])
def test_the_method_governs_histogram_calibrators_only(method: str) -> None:
    quantizer = SelectiveQuantizer(default_quant_modules_calibrator_weights="histogram")
    quantizer.register_layer_scheme({"stem"}, calibrator_inputs="max", calibrator_weights="max")
    quantizer.register_layer_scheme({"head"}, calibrator_inputs="mse")
    model = quantizer.quantize_module(Net().eval())
    data = [x * torch.linspace(0, 3, 6) for x in batches()]
    QuantizationCalibrator().calibrate_model(model, data, method, 4, 90.0)
    assert amax(model, "stem") == pytest.approx(torch.cat(data).abs().max().item(), rel=1e-6)
    assert model.head.scheme.inputs.calibrator == "mse"
    block = model.stage1[0].fc1
    assert block.scheme.inputs == block.input_fake_quant.scheme
    assert (block.scheme.inputs.calibrator, block.scheme.weights.calibrator) == (method, method)
    assert block.scheme.inputs.percentile == (90.0 if method == "percentile" else 99.99)
    scheme = TensorScheme(
        granularity="per_channel", calibrator=method, percentile=90.0 if method == "percentile" else 99.99
    )
    expected = range_to_qparams(weight_range(block.weight.detach(), scheme), scheme)[0]
    assert torch.equal(block.weight_fake_quant.scale, expected)
    assert convert_(model).stage1[0].fc1.scheme.inputs.calibrator == method  # what is saved says how it was made


def test_calibrating_again_takes_the_new_method_and_data() -> None:
    model = prepared()
    calibrator = QuantizationCalibrator()
    calibrator.calibrate_model(model, batches(), "max", 4)
    first = amax(model, "stem")
    calibrator.calibrate_model(model, [x / 2 for x in batches()], "max", 4)
    assert amax(model, "stem") == pytest.approx(first / 2)
    calibrator.calibrate_model(model, batches(), "percentile", 4, 90.0)
    assert amax(model, "stem") < first * 0.9


def test_ranges_are_returned_set_and_told(caplog: pytest.LogCaptureFixture) -> None:
    model = prepared()
    with caplog.at_level(logging.INFO, "pyquant.ptq"):
        ranges = QuantizationCalibrator().calibrate_model(model, batches(), "max", 4, verbose=True)
    assert list(ranges) == [
        f"{n}.input"
        for n in ["stem", *(f"stage{s}.{i}.fc{j}" for s, i in ((1, 0), (1, 1), (2, 0)) for j in (1, 2)), "head"]
    ]
    assert "stem.input: [-" in caplog.text
    for name, found in ranges.items():
        assert amax(model, name.removesuffix(".input")) == pytest.approx(found.amax.item(), rel=1e-6)


@pytest.mark.parametrize("what", ["nan", "silent", "few", "interrupt", "model"])
def test_all_or_nothing(what: str) -> None:
    model = prepared()
    QuantizationCalibrator().calibrate_model(model, batches(), "max", 4)
    model.train()
    before, scheme = snapshot(model), model.stem.scheme
    data: list[Any] = batches()
    if what == "nan":
        data[2][0, 0] = float("nan")
    if what == "silent":
        model.stage2.forward = lambda x: x  # type: ignore[method-assign]
    if what == "few":
        data = data[:3]
    if what == "interrupt":
        data = interrupted(data)
    if what == "model":
        data[1] = torch.ones(2, 5)
    errors: dict[str, Any] = {
        "nan": NonFiniteError,
        "silent": PyquantError,
        "few": PyquantError,
        "interrupt": KeyboardInterrupt,
        "model": RuntimeError,
    }
    with pytest.raises(errors[what]) as error:
        QuantizationCalibrator().calibrate_model(model, data, "percentile", 4, 90.0)
    told = {"nan": r"stem.*batch 2", "silent": "stage2.0.fc1", "few": "3"}.get(what, "")
    assert error.match(told)
    assert is_unchanged(model, before)
    assert model.stem.scheme == scheme == model.stem.scheme
    assert model.training
    assert all(m.mode == "quantize" for m in model.modules() if hasattr(m, "method_is_open"))


def interrupted(data: list[Tensor]) -> Iterator[Tensor]:
    yield from data[:2]
    raise KeyboardInterrupt


def test_batches_of_every_kind() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.fc(x if mask is None else x * mask)

    x = batches(1)[0]
    for batch, to_inputs in (
        (x, None),
        ((x, torch.zeros(3)), None),
        ([x, "label"], None),
        ({"x": x, "labels": 1}, None),
        ({"image": x}, lambda b: b["image"]),
        ((x, torch.ones(6)), lambda b: b),
        ({"a": x}, lambda b: {"x": b["a"], "mask": torch.ones(6)}),
    ):
        model = SelectiveQuantizer().quantize_module(nn.Sequential(Keywords())[0])
        QuantizationCalibrator().calibrate_model(model, [batch], "max", 1, batch_to_inputs=to_inputs)
        assert float(model.fc.input_fake_quant.scale) * 127 == pytest.approx(x.abs().max().item())


def test_dynamic_models_need_no_data() -> None:
    model = prepared(scheme=pyquant.W8A8Dynamic())
    data = Counted()
    assert QuantizationCalibrator().calibrate_model(model, data) == {}
    assert data.taken == 0
    convert_(model)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    whole, resumed = prepared(), prepared()
    expected = QuantizationCalibrator().calibrate_model(whole, batches(6), "entropy", 6)
    options = {"save_every": 1, "save_to": str(tmp_path / "progress")}
    with pytest.raises(KeyboardInterrupt):
        QuantizationCalibrator().calibrate_model(resumed, interrupted(batches(6)), "entropy", 6, **options)
    ran: list[int] = []
    resumed.stem.register_forward_hook(lambda *a: ran.append(1))
    found = QuantizationCalibrator().calibrate_model(resumed, batches(6), "entropy", 6, **options)
    assert len(ran) < 6
    assert {n: (r.low, r.high) for n, r in found.items()} == {n: (r.low, r.high) for n, r in expected.items()}


def test_compare_asks_every_method_about_the_same_data() -> None:
    model = prepared()
    calibrator = QuantizationCalibrator()
    before, scheme = snapshot(model), model.stem.scheme.inputs
    found = calibrator.compare(model, batches(), num_calib_batches=4, percentile=90.0)
    assert is_unchanged(model, before)
    assert not model.stem.input_fake_quant.is_calibrated
    assert model.stem.input_fake_quant.scheme == model.stem.scheme.inputs == scheme
    assert list(found["stem.input"]) == ["max", "entropy", "mse", "percentile"]
    for method in ("max", "percentile", "entropy", "mse"):
        again = prepared()
        ranges = calibrator.calibrate_model(again, batches(), method, 4, 90.0)
        assert {n: r.amax for n, r in ranges.items()} == {n: by[method].amax for n, by in found.items()}
    stem = {m: r.amax for m, r in found["stem.input"].items()}
    assert found["stem.input"]["max"].clipping_error == 0 < found["stem.input"]["percentile"].clipping_error
    assert stem["percentile"] < stem["max"] == pytest.approx(torch.cat(batches()).abs().max().item())
    with pytest.raises(ArgumentError, match="'median'"):
        calibrator.compare(model, batches(), ["median"], 4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"method": "histogram"}, "method"),
        ({"method": None}, "method"),
        ({"percentile": 0}, "percentile"),
        ({"percentile": True}, "percentile"),
        ({"num_calib_batches": 0}, "num_batches"),
        ({"model": Net()}, "model"),
        ({"model": 3}, "model"),
        ({"calib_data_loader": [["text"]]}, "str"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], told: str) -> None:
    given = {"model": prepared(), "calib_data_loader": batches(), "num_calib_batches": 1, **arguments}
    with pytest.raises(ArgumentError, match=told):
        QuantizationCalibrator().calibrate_model(**given)


def test_the_integer_model_computes_what_was_simulated() -> None:
    model = prepared()
    x = batches()[0]
    QuantizationCalibrator().calibrate_model(model, batches(), "percentile", 4)
    expected = model(x)
    torch.testing.assert_close(convert_(model)(x), expected, rtol=1e-4, atol=1e-4)
