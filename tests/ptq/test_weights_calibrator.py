"""The weights' calibrator of a scheme: every way to a quantised model uses it or refuses, files say what was done."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant import QConv2d, QLinear, QScheme, TensorScheme, numerics
from pyquant.calibrate import Range, calibrator, weight_qparams
from pyquant.cli.main import main
from pyquant.core.registry import CALIBRATORS
from pyquant.errors import SchemeError
from pyquant.simulate.calibrate import calibrate_

METHODS = ("max", "percentile", "entropy", "mse")
BASES = (
    pyquant.W8A8Dynamic(),
    pyquant.W4A8Dynamic(32),
    pyquant.W4A8TwoLevelDynamic(32),
    pyquant.W4A4Dynamic(),
    pyquant.W4A16(32, symmetric=False),
    QScheme(TensorScheme(bits=4, granularity="per_tensor"), TensorScheme()),
    pyquant.W8A8(),
)


def net() -> nn.Module:
    """Weights with a tail, so that every calibrator finds another range."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.copy_(torch.distributions.StudentT(3.0).sample(layer.weight.shape) / 8)
    return model


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 64) for _ in range(2)]


def by(scheme: QScheme, method: str) -> QScheme:
    return replace(scheme, weights=replace(scheme.weights, calibrator=method, percentile=97.0))


def check(layer: Any, weight: Tensor, scheme: QScheme) -> None:
    """The layer's scheme, scales, zero points and codes are those that the scheme's calibrator gives."""
    w = scheme.weights
    scale, zero_point = weight_qparams(weight, w)
    if w.granularity == "per_tensor":
        scale, zero_point = scale.repeat(len(weight)), zero_point.repeat(len(weight))
    how = ("per_group", w.group_size) if w.group_size else ("per_channel", 0)
    assert layer.scheme.weights == w
    assert torch.equal(layer.weight_scale, scale)
    assert layer.weight_zero_point is None or torch.equal(layer.weight_zero_point, zero_point)
    assert torch.equal(layer.codes, numerics.quantize(weight.detach(), scale, zero_point, *how, *w.code_range))


def _quantize(scheme: QScheme) -> nn.Module:
    scales = {"0": 0.05, "2": 0.05} if scheme.is_static else None
    return pyquant.quantize_(net(), scheme, input_scales=scales, check_speed=False)


def _by_data(scheme: QScheme) -> nn.Module:
    return pyquant.quantize_(net(), scheme, data=batches(), check_speed=False)


def _by_config(scheme: QScheme) -> nn.Module:
    data = batches() if scheme.is_static else None
    return pyquant.quantize_(net(), {"0": scheme, nn.Linear: scheme}, data=data, check_speed=False)


def _simulated(scheme: QScheme) -> nn.Module:
    model = pyquant.insert_fake_quantize_(net(), scheme)
    if scheme.is_static:
        calibrate_(model, batches(), 2)
    return pyquant.convert_(model)


def _trained_for_no_step(scheme: QScheme) -> nn.Module:
    model = pyquant.insert_fake_quantize_(net(), scheme)
    if scheme.is_static:
        calibrate_(model, batches(), 2)
    return pyquant.convert_(pyquant.prepare_qat_(model).eval())


def _selective(scheme: QScheme) -> nn.Module:
    model = pyquant.SelectiveQuantizer(scheme=scheme).quantize_module(net())
    if scheme.is_static:
        calibrate_(model, batches(), 2)
    return pyquant.convert_(model)


def _recipe(scheme: QScheme) -> nn.Module:
    w = scheme.weights
    text = str(by(scheme, "max")).partition(", weights")[0]
    weights: dict[str, Any] = {"calibrator": w.calibrator, "percentile": w.percentile}
    if w.granularity == "per_tensor":
        weights["granularity"] = w.granularity
    rule = {"scheme": text, "weights": weights}
    recipe = pyquant.Recipe.from_dict({"default": rule, "calib_params": {"num_calib_batches": 2}})
    return pyquant.quantize_(net(), recipe, data=batches() if scheme.is_static else None, check_speed=False)


def _from_float(scheme: QScheme) -> nn.Module:
    scale = 0.05 if scheme.is_static else None
    return nn.Sequential(
        *(QLinear.from_float(m, scheme, input_scale=scale) if isinstance(m, nn.Linear) else m for m in net())
    )


WAYS: tuple[Callable[[QScheme], nn.Module], ...] = (
    _from_float,
    _quantize,
    _by_data,
    _by_config,
    _simulated,
    _trained_for_no_step,
    _selective,
    _recipe,
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_uses_it(way: Callable[[QScheme], nn.Module], method: str) -> None:
    for base in BASES:
        scheme = by(base, method)
        model = way(scheme)
        for name, layer in net().named_children():
            if isinstance(layer, nn.Linear):
                check(model.get_submodule(name), layer.weight, scheme)


def test_methods_differ_here() -> None:
    """Else the test above could not fail."""
    weight = net()[0].weight
    scales = [weight_qparams(weight, by(pyquant.W4A4Dynamic(), method).weights)[0] for method in METHODS]
    assert all(not torch.equal(a, b) for i, a in enumerate(scales) for b in scales[:i])


@pytest.mark.parametrize("method", METHODS)
def test_convolutions_use_it(method: str) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3)
    scheme = by(pyquant.W4A8Dynamic(None), method)
    matrix = conv.weight.detach().permute(0, 2, 3, 1).reshape(6, -1)
    check(QConv2d.from_float(conv, scheme), matrix, scheme)
    check(pyquant.convert_(pyquant.insert_fake_quantize_(nn.Sequential(conv), scheme))[0], matrix, scheme)


@pytest.mark.parametrize("method", METHODS)
def test_files_say_what_was_done(method: str, tmp_path: Path) -> None:
    scheme = by(pyquant.W4A8Dynamic(32), method)
    pyquant.save_pretrained(_quantize(scheme), tmp_path)
    loaded = pyquant.load_pretrained(tmp_path, net())
    check(loaded[0], net()[0].weight, scheme)


def test_a_plan_of_a_search_uses_it() -> None:
    options: dict[str, Any] = {"objective": "size", "num_batches": 2, "max_drop": None, "max_effective_bits": 5.0}
    plan = pyquant.search(net(), None, batches(), ("float", "int4"), **options)
    assert plan.configuration == {"0": "int4", "2": "int4"}
    model = plan.apply_(net())
    for name in "02":
        scheme = plan.schemes[name]
        assert scheme is not None
        assert scheme.weights.calibrator == "mse"
        check(model.get_submodule(name), net().get_submodule(name).weight, scheme)


@pytest.mark.parametrize("option", ["--config", "--recipe"])
def test_the_command_line_uses_it(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = {"scheme": "W4A8Dynamic(group_size=32)", "weights": {"calibrator": "mse"}}
    (tmp_path / "how.json").write_text(json.dumps({"default": rule}))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", "test_weights_calibrator:net", option, "how.json", "--out", "out"]) == 0
    loaded = pyquant.load_pretrained("out", net())
    base = pyquant.W4A8Dynamic(32)
    for name in "02":
        scheme = replace(base, weights=replace(base.weights, calibrator="mse"))
        check(loaded.get_submodule(name), net().get_submodule(name).weight, scheme)


def test_whoever_says_a_calibrator_has_it_instead_of_the_presets() -> None:
    def weights(*said: str, scheme: QScheme, **options: Any) -> str:
        model = pyquant.SelectiveQuantizer(*said, scheme=scheme, verbose=False, **options).quantize_module(net())
        return str(model[0].scheme.weights.calibrator)

    four, mse8 = pyquant.W4A8(32), by(pyquant.W8A8(), "mse")
    assert [weights(*said, scheme=four) for said in ((), ("max",), ("entropy",))] == ["mse", "max", "entropy"]
    assert [weights(*said, scheme=pyquant.W8A8()) for said in ((), ("mse",))] == ["max", "mse"]
    assert [weights(*said, scheme=mse8) for said in ((), ("max",))] == ["mse", "mse"]  # which no preset has unasked
    assert weights(scheme=by(four, "max")) == "max"
    naive = (
        pyquant.SelectiveQuantizer(scheme=pyquant.W4A4(), mode="naive", verbose=False).quantize_module(net())[0].scheme
    )
    assert (naive.weights.calibrator, naive.inputs.calibrator) == ("mse", "mse")
    recipe = {"default": "W4A8(group_size=32)"}
    for said, want in (({}, "mse"), ({"selective_quantizer_params": {"calibrator_w": "max"}}, "max")):
        assert pyquant.prepare_(net(), recipe | said)[0].scheme.weights.calibrator == want
    assert pyquant.W4A16(symmetric=False).weights.calibrator == pyquant.W8A16().weights.calibrator == "max"


def test_the_inputs_of_a_preset_are_as_the_preset_or_the_user_says() -> None:
    """Every way to static 4-bit inputs has the preset's 'mse', unless a calibrator is given."""

    def inputs(model: nn.Module) -> str:
        return str(model[0].scheme.inputs.calibrator)

    four, data, quick = pyquant.W4A4(), batches(), {"check_speed": False}
    by_max = replace(four, inputs=replace(four.inputs, calibrator="max"))
    found = {}
    for name, scheme in (("mse", four), ("max", by_max)):
        model = pyquant.quantize_(net(), scheme, data=data, **quick)
        assert inputs(model) == name
        found[name] = model[0].input_scale
        recipe = {
            "default": {"scheme": "W4A4", "inputs": {"calibrator": name}},
            "calib_params": {"num_calib_batches": 2},
        }
        for other in (
            pyquant.quantize_(net(), {nn.Linear: scheme}, data=data, **quick),
            pyquant.quantize_(net(), pyquant.Recipe.from_dict(recipe), data=data, **quick),
            pyquant.convert_(pyquant.prepare_qat_(_prepared(scheme, data)).eval()),
        ):
            assert inputs(other) == name
            assert torch.equal(other[0].input_scale, found[name])
    assert found["mse"] < 0.9 * found["max"]
    # SuperGradients' default, 'histogram', leaves the inputs of presets to the method of the calibration call
    for said, want in (((), "entropy"), ((None, "max"), "max"), ((None, "mse"), "mse")):
        model = pyquant.SelectiveQuantizer(*said, scheme=four, verbose=False).quantize_module(net())
        pyquant.QuantizationCalibrator().calibrate_model(model, data, "entropy", 2)
        assert inputs(model) == want
    quantizer = pyquant.SelectiveQuantizer("max", "max", scheme=four, mode="naive", verbose=False)
    assert inputs(quantizer.quantize_module(net())) == "max"
    quantizer = pyquant.SelectiveQuantizer(verbose=False)
    quantizer.register_layer_scheme({"0"}, four, calibrator_inputs="mse")
    assert inputs(quantizer.quantize_module(net())) == "mse"


def _prepared(scheme: QScheme, data: list[Tensor]) -> nn.Module:
    return calibrate_(pyquant.insert_fake_quantize_(net(), scheme), data, 2)


def test_a_range_that_nobody_gives_is_refused() -> None:
    scheme = by(pyquant.W8A8Dynamic(), "fixed")
    with pytest.raises(SchemeError, match=r"'weights.calibrator': got 'fixed'; allowed: max, .*from_codes"):
        QLinear.from_float(nn.Linear(8, 4), scheme)
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SchemeError, match="'fixed'"):
        pyquant.quantize_(model, scheme, check_speed=False)
    assert isinstance(model[0], nn.Linear)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_users_own_is_used() -> None:
    @calibrator("half of the maximum")
    def half(statistics: Any, scheme: TensorScheme) -> Range:
        low, high = statistics.range()
        return Range(low / 2, high / 2)

    try:
        scheme = by(pyquant.W8A8Dynamic(), "half of the maximum")
        layer = QLinear.from_float(net()[0], scheme)
        check(layer, net()[0].weight, scheme)
        assert int((layer.codes.abs() == 127).sum()) > len(layer.codes)
    finally:
        CALIBRATORS.remove("half of the maximum")


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_layers_without_weights_are_made(shape: tuple[int, int]) -> None:
    linear = nn.Linear(shape[1], shape[0])
    assert QLinear.from_float(linear, by(pyquant.W8A8Dynamic(), "mse"))(torch.ones(2, shape[1])).shape == (2, shape[0])
