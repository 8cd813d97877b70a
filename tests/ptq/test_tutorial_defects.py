"""What the tutorials get wrong, a test for each: docs/from-the-tutorials.md lists them and names these tests."""

from __future__ import annotations

import pickle
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from blocks import Block, Net, batches

import pyquant
from pyquant import QuantizationCalibrator, Recipe, SelectiveQuantizer, convert_, numerics, ops, prepare_qat_
from pyquant.calibrate import HistogramStatistics, compute_range
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.nn.qlinear import QLinear
from pyquant.qat.learned import LearnedFakeQuantize

ROOT = Path(__file__).resolve().parents[2]


class Marked:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (self.path, "w"))


def test_a_pickled_model_is_never_executed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("manifest.json", "config.json", "model.safetensors", "my_model.pth"):
        (folder / name).write_bytes(pickle.dumps(Marked(str(tmp_path / "executed"))))
    with pytest.raises(CheckpointError):
        pyquant.load_pretrained(folder, Net)
    assert not (tmp_path / "executed").exists()


def test_a_dynamic_int8_layer_has_a_cuda_implementation() -> None:
    layer = pyquant.quantize_(nn.Sequential(nn.Linear(16, 8)), pyquant.W8A8Dynamic())[0]
    if torch.cuda.is_available():
        assert torch.equal(layer.cuda()(torch.ones(2, 16).cuda()).cpu(), layer.cpu()(torch.ones(2, 16)))
    if ops.native_available():
        assert torch._C._dispatch_has_kernel_for_dispatch_key("pyquant::qlinear", "CUDA")
    assert (ROOT / "csrc/bind/ops_cuda.cpp").read_text().count("qlinear")


@pytest.mark.parametrize("scheme", [pyquant.W8A8Dynamic(), pyquant.W4A4Dynamic()])
def test_prepare_simulates_and_does_not_only_observe(scheme: pyquant.QScheme) -> None:
    float_model, model = Net(), Net()
    prepare_qat_(model, scheme)
    x = batches()[0]
    simulated = model(x)
    assert not torch.equal(simulated, float_model(x))  # observers alone would change nothing
    simulated.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    weight = model.head.weight_fake_quant(model.head.weight)
    assert len(weight[0].unique()) <= (255 if scheme.weights.bits == 8 else 15)
    torch.testing.assert_close(convert_(model)(x), simulated.detach(), rtol=1e-4, atol=1e-4)


def test_half_precision_keeps_float32_masters_and_scales() -> None:
    model = Net()
    prepare_qat_(model, pyquant.W8A8Dynamic())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batches()[0]).square().mean()
    loss.backward()
    before = model.head.weight.detach().clone()
    optimizer.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.equal(before, model.head.weight)
    static = SelectiveQuantizer().quantize_module(Net())
    QuantizationCalibrator().calibrate_model(static, batches(), "max", 4)
    static.half()  # raised a dtype error in the original
    assert static.head.input_fake_quant.scale.dtype == torch.float32
    assert static(batches()[0].half()).dtype == torch.float16


def test_a_converted_model_takes_float_inputs_without_stubs() -> None:
    model = convert_(SelectiveQuantizer(scheme=pyquant.W8A8Dynamic()).quantize_module(Net()))
    assert isinstance(model.stem, QLinear)
    assert model(batches()[0]).dtype == torch.float32


def test_every_layer_runs_in_its_own_precision() -> None:
    model = Net()
    schemes = {"stem": pyquant.W8A8Dynamic(), "stage*": pyquant.W4A8Dynamic(None), "head": pyquant.W4A4Dynamic()}
    pyquant.quantize_(model, schemes)
    x = batches()[0]
    h = x
    for layer in (model.stem, model.stage1[0].fc1):  # not all with the first layer's arguments
        h = layer(h)
        reference = layer.reference(x if layer is model.stem else model.stem.reference(x))
        assert torch.equal(h, reference)
    assert len({(m.scheme.weights.bits, m.scheme.inputs.bits) for m in model.modules() if isinstance(m, QLinear)}) == 3


def test_the_product_is_scaled_and_not_multiplied_by_zero() -> None:
    layer = QLinear.from_float(nn.Linear(32, 4), pyquant.W8A8Dynamic())
    x = batches(1, 8, 32)[0]
    real = torch.nn.functional.linear(x, layer.to_float().weight, layer.bias)
    assert layer(x).abs().max() > 0
    assert (layer(x) - real).abs().max() < 0.05 * real.abs().max()


def test_codes_are_made_anew_between_layers() -> None:
    scheme = pyquant.QScheme(
        TensorScheme(granularity="per_channel"), TensorScheme(), outputs=TensorScheme()
    )  # int8 in, int8 out
    torch.manual_seed(0)
    first = QLinear.from_float(nn.Linear(16, 8), scheme, input_scale=0.02, output_scale=0.03)
    second = QLinear.from_float(nn.Linear(8, 4), pyquant.W8A8(), input_scale=0.03)
    codes = first(batches(1, 4, 16)[0])
    assert codes.data.dtype == torch.int8  # not the int32 accumulator
    assert torch.equal(second(codes), second(codes.data.float() * 0.03))


def test_int4_weights_are_packed_two_to_a_byte() -> None:
    layer = QLinear.from_float(nn.Linear(65, 8), pyquant.W4A4Dynamic())
    assert layer.state_dict()["weight_packed"].shape == (8, 33)
    assert layer.state_dict()["weight_packed"].dtype == torch.uint8


def test_timings_leave_out_the_first_call_and_pair_the_rounds() -> None:
    from pyquant.measure import timing

    text = Path(timing.__file__).read_text()
    assert "untimed" in text or "warm" in text  # the behaviour itself: tests/measure/test_timing.py
    assert (ROOT / "tests/measure/test_timing.py").is_file()


def test_nothing_of_cutlass_is_needed_at_run_time() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = (\[.*?\])", project, re.M | re.S)
    assert needed is not None
    assert not re.search("cutlass|pycutlass|cuda", needed[1])


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.0, 2.0), (-5.0, -1.0), (0.5, 0.75), (-1000.0, 2000.0)])
def test_affine_codes_do_not_wrap(low: float, high: float) -> None:
    generator = np.random.default_rng(0)
    weights = torch.from_numpy(generator.uniform(low, high, 4096).astype(np.float32))
    scale, zero_point = numerics.qparams_from_range(weights.min().reshape(1), weights.max().reshape(1), -128, 127)
    codes = numerics.quantize(weights, scale, zero_point, "per_tensor", 0, -128, 127)
    back = numerics.dequantize(codes, scale, zero_point, "per_tensor")
    assert codes.dtype == torch.int8
    assert (weights - back).abs().max() <= scale.item() * 0.5001 + 1e-6  # a wrapped code is off by 256 steps
    assert (weights - back).abs().mean() < scale.item() * 0.3


@pytest.mark.parametrize("value", [0.0, 3.25, -3.25])
def test_a_constant_tensor_has_a_scale_and_the_range_contains_zero(value: float) -> None:
    x = torch.full((64,), value)
    statistics = HistogramStatistics()
    statistics.observe(x)
    found = compute_range(statistics, TensorScheme(symmetric=False))
    assert found.low <= 0 <= found.high
    scale, zero_point = numerics.qparams_from_range(found.low.reshape(1), found.high.reshape(1), -128, 127)
    assert scale > 0
    codes = numerics.quantize(x, scale, zero_point, "per_tensor", 0, -128, 127)
    torch.testing.assert_close(numerics.dequantize(codes, scale, zero_point, "per_tensor"), x, rtol=0.005, atol=1e-6)


def test_static_ranges_are_never_made_up() -> None:
    with pytest.raises(ArgumentError, match="input_scales"):
        pyquant.quantize_(Net(), pyquant.W8A8())  # a default without data would only quantise the weights
    with pytest.raises(ArgumentError, match="not calibrated"):
        convert_(SelectiveQuantizer().quantize_module(Net()))
    with pytest.raises(ArgumentError, match="data"):
        pyquant.quantize_recipe_(Net(), {})


def test_the_mapping_call_needs_a_class() -> None:
    quantizer = SelectiveQuantizer()
    with pytest.raises(ArgumentError, match="quantized_target_class"):
        quantizer.register_quantization_mapping({"stage1"}, quantizer)  # as printed, could it be parsed
    quantizer.register_quantization_mapping({"stage1"}, Block, float_source=Block)


@pytest.mark.parametrize("indent", ["  ", "    "])
def test_both_shapes_of_the_callback_are_read(indent: str) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = f"pre_launch_callbacks_list:\n- QATRecipeModificationCallback:\n{indent}lr_decay_factor: 0.05\n"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        recipe = Recipe.loads(text)
    assert recipe.callback is not None
    assert recipe.callback.lr_decay_factor == 0.05
    assert bool(seen) == (indent == "  ")


def test_so_many_batches_and_not_one_more() -> None:
    taken: list[int] = []

    def stream():
        for i in range(100):
            taken.append(i)
            yield batches(1)[0]

    model = SelectiveQuantizer().quantize_module(Net())
    QuantizationCalibrator().calibrate_model(model, stream(), num_calib_batches=5)
    assert len(taken) == 5


def test_ranges_of_per_channel_weights_are_learned_too() -> None:
    model = SelectiveQuantizer(default_learn_amax=True).quantize_module(Net())
    QuantizationCalibrator().calibrate_model(model, batches(), num_calib_batches=4)
    prepare_qat_(model, learn_amax=True)
    fake = model.stem.weight_fake_quant
    assert isinstance(fake, LearnedFakeQuantize)
    assert fake.scale.shape == (8,)  # one a channel
    model(batches()[0]).square().sum().backward()
    assert fake.scale.grad is not None
    assert (fake.scale.grad != 0).any()


def test_the_number_of_gpus_is_left_alone() -> None:
    cfg = {
        "training_hyperparams": {"max_epochs": 20, "initial_lr": 0.1, "optimizer_params": {"weight_decay": 0.0}},
        "dataset_params": {},
        "num_gpus": 8,
        "multi_gpu": "DDP",
    }
    new = pyquant.QATRecipeModificationCallback()(cfg)
    assert (new["num_gpus"], new["multi_gpu"]) == (8, "DDP")


def test_bins_count_beyond_two_to_the_24() -> None:
    statistics = HistogramStatistics()
    statistics.observe(torch.ones(4096))
    for _ in range(13):  # doubles 13 times: 2^25 equal numbers in one bin
        statistics.merge(statistics_like(statistics))
    statistics.observe(torch.ones(1))
    assert statistics.count == 2**25 + 1
    assert int(statistics.counts.max()) == 2**25 + 1  # a float32 counter would stand still at 2^24


def statistics_like(statistics: HistogramStatistics) -> HistogramStatistics:
    copy = HistogramStatistics()
    copy.load_state_dict(statistics.state_dict())
    return copy


def test_entropy_does_not_depend_on_how_much_data_there_is() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**18, generator=generator)  # enough for all bins of the search, both times
    ranges = []
    for repeats in (1, 3):
        statistics = HistogramStatistics()
        for _ in range(repeats):
            statistics.observe(x)
        ranges.append(compute_range(statistics, TensorScheme(bits=4, calibrator="entropy")).amax.item())
    assert ranges[0] == ranges[1]  # distributions are normalised before they are compared
    assert ranges[0] < x.abs().max().item()  # at 4 bits some clipping is best
