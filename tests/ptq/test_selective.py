"""SelectiveQuantizer: which rule wins, the three modes, per-layer schemes and calibrators, and all or nothing."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from blocks import Block, Net, batches, is_unchanged, kinds, snapshot

import pyquant
from pyquant import SelectiveQuantizer
from pyquant.errors import ArgumentError
from pyquant.ptq.mapping import QuantizedMetadata
from pyquant.simulate.kinds import SIMULATED
from pyquant.simulate.linear import FakeQuantLinear

LAYERS = ["stem", *(f"stage1.{i}.fc{j}" for i in (0, 1) for j in (1, 2)), "stage2.0.fc1", "stage2.0.fc2", "head"]


def simulated(model: nn.Module) -> list[str]:
    return [name for name, kind in kinds(model).items() if kind == "FakeQuantLinear"]


def test_everything_is_simulated_by_default() -> None:
    model = Net()
    weights = {n: id(p) for n, p in model.named_parameters()}
    assert SelectiveQuantizer().quantize_module(model) is model
    assert simulated(model) == LAYERS
    assert {n: id(p) for n, p in model.named_parameters()} == weights  # optimisers keep their parameters
    scheme = model.stem.scheme
    assert (scheme.weights.granularity, scheme.weights.calibrator) == ("per_channel", "max")
    assert scheme.inputs.granularity == "per_tensor"
    assert model.stem.input_fake_quant.method_is_open


@pytest.mark.parametrize(
    ("keys", "gone"),
    [
        ({"head"}, ["head"]),
        ("head", ["head"]),
        (["stem", "head"], ["stem", "head"]),
        ({"stage1"}, LAYERS[1:5]),
        ({"re:stage[12]\\.0\\.fc1"}, ["stage1.0.fc1", "stage2.0.fc1"]),
        ({"*.fc2"}, ["stage1.0.fc2", "stage1.1.fc2", "stage2.0.fc2"]),
        ({Block}, LAYERS[1:7]),
        ({"head", "re:.*fc1", "stage2.*", Block}, LAYERS[1:]),
    ],
)
def test_skips_by_name_type_glob_and_regex(keys: object, gone: list[str]) -> None:
    model = Net()
    quantizer = SelectiveQuantizer()
    quantizer.register_skip_quantization(layer_names=keys)
    quantizer.quantize_module(model)
    assert simulated(model) == [name for name in LAYERS if name not in gone]


@pytest.mark.parametrize(
    "key", ["haed", "stage3", "re:stem2", "*.fc3", nn.Bilinear, "stage1.0.fc1.weight", "re:(", "", "_default", 3]
)
def test_keys_that_match_nothing_are_errors(key: object) -> None:
    model = Net()
    before = snapshot(model)
    quantizer = SelectiveQuantizer()

    def skip() -> None:
        quantizer.register_skip_quantization(layer_names=[key])
        quantizer.quantize_module(model)

    with pytest.raises(ArgumentError) as error:
        skip()
    assert getattr(key, "__name__", str(key)) in str(error.value)
    assert is_unchanged(model, before)


def test_a_name_wins_over_a_pattern_over_a_type_and_the_inner_over_the_outer() -> None:
    model = Net()
    quantizer = SelectiveQuantizer(scheme=pyquant.W8A8Dynamic())
    quantizer.register_skip_quantization(layer_names={nn.Linear})
    quantizer.register_layer_scheme({"stage*"}, pyquant.W4A8Dynamic(None))
    quantizer.register_layer_scheme({"re:stage1\\..*"}, pyquant.W4A4Dynamic())
    quantizer.register_skip_quantization(layer_names={"stage1.1"})
    quantizer.register_layer_scheme({"stage1.1.fc2"}, pyquant.W8A16())
    quantizer.quantize_module(model)
    found = {name: str(getattr(model.get_submodule(name), "scheme", None)) for name in LAYERS}
    assert found == {
        "stem": "None",
        "stage1.0.fc1": "W4A4Dynamic",
        "stage1.0.fc2": "W4A4Dynamic",
        "stage1.1.fc1": "None",
        "stage1.1.fc2": "W8A16",
        "stage2.0.fc1": "W4A8Dynamic(group_size=None)",
        "stage2.0.fc2": "W4A8Dynamic(group_size=None)",
        "head": "None",
    }


def test_the_order_of_registration_does_not_decide_between_kinds() -> None:
    rules = [({"head"}, None), ({nn.Linear}, pyquant.W8A16()), ({"re:.*fc1"}, pyquant.W4A4Dynamic())]
    found = []
    for order in (rules, rules[::-1]):
        model, quantizer = Net(), SelectiveQuantizer()
        for keys, scheme in order:
            if scheme is None:
                quantizer.register_skip_quantization(keys)
            else:
                quantizer.register_layer_scheme(keys, scheme)
        quantizer.quantize_module(model)
        found.append({name: str(getattr(model.get_submodule(name), "scheme", None)) for name in LAYERS})
    assert found[0] == found[1]
    assert found[0]["head"] == "None"


def test_calibrators_by_layer() -> None:
    model = Net()
    quantizer = SelectiveQuantizer("mse", "entropy", default_per_channel_quant_weights=False)
    quantizer.register_layer_scheme({"stem"}, calibrator_inputs="max")
    quantizer.register_layer_scheme({"head"}, calibrator_weights="histogram", calibrator_inputs="histogram")
    quantizer.register_layer_scheme({"stage2"}, pyquant.W8A8Dynamic())
    own = pyquant.QScheme(
        pyquant.TensorScheme(granularity="per_channel"), pyquant.TensorScheme(calibrator="percentile", percentile=90)
    )
    quantizer.register_layer_scheme({"stage1.1.fc1"}, own)
    quantizer.quantize_module(model)

    def calibrators(layer: FakeQuantLinear) -> tuple[str, str]:
        return layer.scheme.weights.calibrator, layer.scheme.inputs.calibrator

    assert calibrators(model.stem) == ("mse", "max")
    assert calibrators(model.stage1[1].fc1) == ("mse", "percentile")  # a scheme's own calibrator counts
    assert model.stage1[1].fc1.scheme.inputs.percentile == 90
    assert calibrators(model.stage1[0].fc1) == ("mse", "entropy")
    assert model.stage1[0].fc1.scheme.weights.granularity == "per_tensor"
    assert model.stage2[0].fc1.scheme.inputs.dynamic
    assert model.head.weight_fake_quant.method_is_open
    assert model.head.input_fake_quant.method_is_open
    assert not model.stem.input_fake_quant.method_is_open


def test_naive_has_one_calibrator_and_no_exceptions() -> None:
    model = Net()
    SelectiveQuantizer("percentile", mode="naive").quantize_module(model)
    assert simulated(model) == LAYERS
    assert {model.get_submodule(n).scheme.weights.calibrator for n in LAYERS} == {"percentile"}
    assert {model.get_submodule(n).scheme.inputs.calibrator for n in LAYERS} == {"percentile"}
    quantizer = SelectiveQuantizer(mode="naive")
    for call in (
        lambda: quantizer.register_skip_quantization(layer_names={"head"}),
        lambda: quantizer.register_layer_scheme({"head"}, pyquant.W8A16()),
        lambda: quantizer.register_quantization_mapping({"stage1"}, Block),
        lambda: SelectiveQuantizer("max", "mse", mode="naive"),
        lambda: SelectiveQuantizer(mode="naive", skip_last=1),
    ):
        with pytest.raises(ArgumentError, match=r"naive|hybrid"):
            call()


def test_hybrid_only_skips() -> None:
    model = Net()
    quantizer = SelectiveQuantizer(mode="hybrid")
    quantizer.register_skip_quantization(layer_names={"stem"})
    quantizer.register_skip_quantization(layer_names={"head"}, float_dtype="bfloat16")
    for call in (
        lambda: quantizer.register_layer_scheme({"head"}, pyquant.W8A16()),
        lambda: quantizer.register_quantization_mapping({"stage1"}, Block),
        lambda: SelectiveQuantizer(mode="hybrid", custom_mappings={Block: Block}),
    ):
        with pytest.raises(ArgumentError, match="selective"):
            call()
    quantizer.quantize_module(model)
    assert type(model.stem) is nn.Linear
    assert str(model.head.scheme) == "FP16(dtype=bfloat16)"
    assert simulated(model) == LAYERS[1:-1]


def test_convolutions_and_16_bit_layers_of_both_kinds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 2)).eval()
    x = torch.randn(2, 3, 6, 6)
    expected = model(x)
    quantizer = SelectiveQuantizer(default_quant_modules_calibrator_weights="histogram")
    quantizer.register_skip_quantization({"2", "4"}, float_dtype="float16")
    quantizer.quantize_module(model)
    pyquant.QuantizationCalibrator().calibrate_model(model, [x], "mse", 1)
    pyquant.convert_(model)
    assert [type(m).__name__ for m in model] == ["QConv2d", "ReLU", "QConv2d", "Flatten", "QLinear"]
    assert [str(model[i].scheme) for i in (2, 4)] == ["FP16", "FP16"]
    assert model[0].scheme.weights.calibrator == "mse"
    assert (model(x) - expected).abs().max() < 0.05 * expected.abs().max() + 0.02


def test_skip_last() -> None:
    model = Net()
    SelectiveQuantizer(skip_last=2).quantize_module(model)
    assert simulated(model) == LAYERS[:-2]
    with pytest.raises(ArgumentError, match="at most 8"):
        SelectiveQuantizer(skip_last=9).quantize_module(Net())
    quantizer = SelectiveQuantizer(skip_last=1)
    quantizer.register_layer_scheme({"head"}, pyquant.W8A16())  # a name wins
    assert type(quantizer.quantize_module(Net()).head) is FakeQuantLinear


@pytest.mark.parametrize("when", ["scheme", "obstacle"])
def test_all_or_nothing(when: str) -> None:
    model = Net()
    quantizer = SelectiveQuantizer(on_indivisible="error")
    if when == "scheme":  # the last layer fails after all others were replaced
        quantizer.register_layer_scheme({"head"}, pyquant.W4A8(group_size=5))
    else:
        model.head.forward = lambda x: x  # type: ignore[method-assign]
        quantizer.register_layer_scheme({"head"}, pyquant.W8A8())  # named: not left in floating point
    before = snapshot(model)
    with pytest.raises(ArgumentError, match="head"):
        quantizer.quantize_module(model)
    assert is_unchanged(model, before)


def test_shared_layers_stay_shared_and_must_agree() -> None:
    model = Net()
    model.stage2[0].fc1 = model.stem = nn.Linear(8, 8)
    same = SelectiveQuantizer().quantize_module(copy.deepcopy(model))
    assert same.stage2[0].fc1 is same.stem
    assert type(same.stem) is FakeQuantLinear
    quantizer = SelectiveQuantizer()
    quantizer.register_skip_quantization({"stem"})  # one of its names decides for both
    assert type(quantizer.quantize_module(copy.deepcopy(model)).stage2[0].fc1) is nn.Linear
    quantizer.register_layer_scheme({"stage2.0.fc1"}, pyquant.W8A16())
    before = snapshot(model)
    with pytest.raises(ArgumentError, match="shared"):
        quantizer.quantize_module(model)
    assert is_unchanged(model, before)


def test_a_second_run_starts_from_the_float_layers() -> None:
    model = Net()
    quantizer = SelectiveQuantizer()
    quantizer.quantize_module(model)
    quantizer.register_skip_quantization(layer_names={"head", "stem"})
    quantizer.quantize_module(model)
    assert simulated(model) == LAYERS[1:-1]
    assert type(model.head) is nn.Linear
    assert not any(isinstance(m, FakeQuantLinear) for m in (model.head, model.stem))


def test_hooks_and_training_flags_are_carried() -> None:
    model = Net().eval()
    calls: list[str] = []
    handle = model.head.register_forward_hook(lambda *a: calls.append("head"))
    SelectiveQuantizer(scheme=pyquant.W8A8Dynamic()).quantize_module(model)
    model(batches()[0])
    assert calls == ["head"]
    handle.remove()
    model(batches()[0])
    assert calls == ["head"]
    assert not any(m.training for m in model.modules())


def test_attention_keeps_its_projection_and_encoders_leave_the_fused_path() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    model = nn.Sequential(encoder)
    quantizer = SelectiveQuantizer(scheme=pyquant.W8A8Dynamic())
    quantizer.quantize_module(model)
    told = {outcome.name: outcome for outcome in quantizer.report}
    assert not encoder.use_nested_tensor
    assert "MultiheadAttention" in told["0.layers.0.self_attn.out_proj"].why
    seen: list[int] = []
    encoder.layers[0].linear1.register_forward_hook(lambda *a: seen.append(1))
    with torch.no_grad():
        model(torch.randn(2, 3, 8))
    assert seen == [1]


def test_what_happened_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    quantizer = SelectiveQuantizer()
    quantizer.register_skip_quantization(layer_names={"head"})
    with caplog.at_level(logging.INFO, "pyquant.ptq"):
        quantizer.quantize_module(model)
    assert [o.name for o in quantizer.report] == LAYERS
    assert quantizer.report[-1].what == "floating point"
    assert "skipped by head" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "pyquant.ptq"):
        SelectiveQuantizer(verbose=False).quantize_module(Net())
    assert not caplog.text


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: SelectiveQuantizer("average"), "'average'"),
        (lambda: SelectiveQuantizer(default_quant_modules_calibrator_inputs="fixed"), "'fixed'"),
        (lambda: SelectiveQuantizer(default_per_channel_quant_weights=1), "default_per_channel_quant_weights"),
        (lambda: SelectiveQuantizer(default_learn_amax="no"), "default_learn_amax"),
        (lambda: SelectiveQuantizer(mode="mixed"), "'mixed'"),
        (lambda: SelectiveQuantizer(scheme="W8A8"), "scheme"),
        (lambda: SelectiveQuantizer(skip_last=-1), "skip_last"),
        (lambda: SelectiveQuantizer().register_skip_quantization(set()), "layer_names"),
        (lambda: SelectiveQuantizer().register_skip_quantization({"a"}, float_dtype="float8"), "float_dtype"),
        (lambda: SelectiveQuantizer().register_layer_scheme({"a"}, "W8A8"), "scheme"),
        (lambda: SelectiveQuantizer().register_layer_scheme({"a"}, calibrator_inputs="x"), "calibrator_inputs"),
        (lambda: SelectiveQuantizer().quantize_module(nn.Linear(2, 2)), "model"),
        (lambda: SelectiveQuantizer().quantize_module(nn.Sequential(nn.ReLU())), "model"),
        (lambda: QuantizedMetadata(Block, None), "quantized_target_class"),
    ],
)
def test_bad_arguments_are_named(make: object, told: str) -> None:
    with pytest.raises(ArgumentError) as error:
        make()
    assert told in str(error.value)


def test_signature_is_that_of_the_guide() -> None:
    import inspect

    found = {n: p.default for n, p in list(inspect.signature(SelectiveQuantizer).parameters.items())[:5]}
    assert found == {
        "default_quant_modules_calibrator_weights": None,  # the scheme's own: "max", as the guide says, for its int8
        "default_quant_modules_calibrator_inputs": "histogram",
        "default_per_channel_quant_weights": True,
        "default_learn_amax": False,
        "verbose": True,
    }
    assert nn.Linear in SIMULATED


# ---- nothing stays in floating point in silence


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.attn, self.fc = nn.LSTM(24, 24), nn.MultiheadAttention(24, 2), nn.Linear(24, 8)


def test_naive_mode_names_what_is_no_layer() -> None:
    with pytest.warns(
        pyquant.QuantizationWarning, match=r"SelectiveQuantizer: .*rnn \(LSTM.*attn \(Multihead.*out_proj"
    ):
        SelectiveQuantizer(mode="naive", verbose=False).quantize_module(Mixed())
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        model = pyquant.expose_linears_(Mixed())
        SelectiveQuantizer(mode="naive", verbose=False).quantize_module(model)
        hybrid = SelectiveQuantizer(mode="hybrid", verbose=False)
        hybrid.register_skip_quantization({"rnn", nn.MultiheadAttention})
        hybrid.quantize_module(Mixed())
    told = {r.scheme for r in pyquant.quantization_report(model)}
    assert told == {"W8A8, simulated"}


@pytest.mark.parametrize(
    ("choice", "want"), [("per_channel", "W4A8Dynamic(group_size=None)"), ("skip", "floating point")]
)
def test_groups_that_do_not_divide(choice: str, want: str) -> None:
    quantizer = SelectiveQuantizer(scheme=pyquant.W4A8Dynamic(16), on_indivisible=choice, verbose=False)
    quantizer.quantize_module(nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 8)))
    assert [outcome.what for outcome in quantizer.report] == [want, "W4A8Dynamic(group_size=16)"]
    assert "does not divide K = 24" in quantizer.report[0].why
    recipe = pyquant.Recipe.from_dict({"default": "W4A8Dynamic(group_size=16)", "on_indivisible": choice})
    assert pyquant.Recipe.loads(recipe.dumps()) == recipe
    assert SelectiveQuantizer.from_recipe(recipe).on_indivisible == choice
    with pytest.raises(ArgumentError, match="on_indivisible"):
        SelectiveQuantizer(on_indivisible="no")
    strict = SelectiveQuantizer(scheme=pyquant.W4A8Dynamic(16), verbose=False, on_indivisible="error")
    with pytest.raises(pyquant.SchemeError, match=r"0: group_size"):
        strict.quantize_module(nn.Sequential(nn.Linear(24, 32)))
