"""Every way through the library with a model and data on the CPU while torch's default device is 'meta': a tensor that
is made without a device has no numbers then, and fails or shows.

    python tests/support/default_device.py [NAME ...]     prints a line of JSON for each: its name and what went wrong
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

torch.set_default_device("meta")  # before pyquant is imported: what it makes then is not spared
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import pyquant  # noqa: E402

CPU = torch.device("cpu")
FLOWS: dict[str, Callable[[], Any]] = {}
PRESETS = ("W8A8", "W8A8Dynamic", "W4A8", "W4A8Dynamic", "W4A8TwoLevel", "W4A8TwoLevelDynamic", "W4A4", "W4A4Dynamic")
WEIGHT_ONLY = ("W8A16", "W4A16", "W8A16(group_size=64)", "FP16", "FP16(dtype=bfloat16)")
AFFINE = ("W8A8(symmetric_inputs=False)", "W8A8Dynamic(symmetric_inputs=False)", "W4A16(symmetric=False)")


def flow(run: Callable[[], Any]) -> Callable[[], Any]:
    FLOWS[run.__name__] = run
    return run


def perceptron() -> nn.Module:
    with CPU:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 8)).eval()


def batches(*shape: int, count: int = 3) -> list[Tensor]:
    return [torch.randn(shape or (16, 128), device=CPU) for _ in range(count)]


def on_cpu(model: nn.Module, *xs: Any) -> None:
    """The model has numbers, all on the CPU, and so has what it makes of those."""
    for name, tensor in model.state_dict().items():
        assert not isinstance(tensor, Tensor) or tensor.device == CPU, f"{name} is on {tensor.device}"
    y = model(*xs)
    if hasattr(y, "dequantize"):
        y = y.dequantize()
    assert y.device == CPU, f"the result is on {y.device}"
    assert bool(y.isfinite().all())


@flow
def presets() -> None:
    x = batches()
    for name in (*PRESETS, *WEIGHT_ONLY, *AFFINE):
        model = pyquant.quantize_(perceptron(), name, data=x if "Dynamic" not in name and "A16" not in name else None)
        on_cpu(model, x[0])
        on_cpu(pyquant.dequantize_(copy.deepcopy(model)), x[0])
        layer = model[0]
        assert layer.reference(x[0]).device == CPU
        assert layer.kernel_info(4).device == "cpu"


@flow
def files_to_files() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(x)))

    def build() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(2))).eval()

    x = batches(16, 32)
    with tempfile.TemporaryDirectory() as folder:
        with CPU:
            torch.manual_seed(0)
            save_file(build().state_dict(), Path(folder, "model.safetensors"))
        Path(folder, "config.json").write_text("{}")
        with torch.device("meta"):
            large = build()
        pyquant.quantize_files(large, folder, f"{folder}/out", "W4A8(group_size=None)", data=x, improve=["gptq"])
        with CPU:
            small = build()
        on_cpu(pyquant.load_pretrained(f"{folder}/out", lambda: small), x[0])


@flow
def gradients() -> None:
    for name in ("W8A8Dynamic", "W4A16", "FP16(dtype=bfloat16)"):
        model = pyquant.quantize_(perceptron(), name)
        x = batches()[0].requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None
        assert x.grad.device == CPU


@flow
def calibrators() -> None:
    from pyquant.core.registry import data_calibrators

    for method in data_calibrators():
        model = pyquant.SelectiveQuantizer().quantize_module(perceptron())
        calibrator = pyquant.QuantizationCalibrator()
        calibrator.calibrate_model(model, batches(), method=method, num_calib_batches=3)
        calibrator.histograms(model, batches(), num_calib_batches=3)
        on_cpu(pyquant.convert_(model), batches()[0])


@flow
def collectors() -> None:
    from pyquant.calibrate import HistogramStatistics, compute_range, range_to_qparams

    for method in ("max", "percentile", "entropy", "mse"):
        for axis, granularity in ((None, "per_tensor"), (1, "per_channel")):
            statistics = HistogramStatistics(axis)
            for x in batches(16, 8):
                statistics.observe(x)
            again = HistogramStatistics(axis)
            again.load_state_dict(statistics.state_dict())
            scheme = pyquant.TensorScheme(calibrator=method, granularity=granularity)
            scale, _ = range_to_qparams(compute_range(again, scheme), scheme)
            assert scale.device == CPU
    for made in (
        pyquant.MaxCalibrator(),
        pyquant.HistogramCollector(),
        pyquant.EntropyCalibrator(),
        pyquant.MSECalibrator(),
        pyquant.PercentileCalibrator(),
    ):
        made.collect(batches()[0])
        made.compute_amax()


@flow
def files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(("W8A8", "W4A8TwoLevelDynamic", *WEIGHT_ONLY, *AFFINE)):
            data = batches() if "Dynamic" not in name and "A16" not in name else None
            model = pyquant.quantize_(perceptron(), name, data=data)
            pyquant.save_pretrained(model, f"{folder}/{i}")
            on_cpu(pyquant.load_pretrained(f"{folder}/{i}", perceptron), batches()[0])


@flow
def empty_files() -> None:
    """Tensors of no elements, which readers of files make anew."""

    def build() -> nn.Module:
        with CPU:
            return nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 8, bias=False))

    with tempfile.TemporaryDirectory() as folder:
        model = pyquant.quantize_(build(), "W8A8Dynamic")
        pyquant.save_pretrained(model, f"{folder}/empty")
        on_cpu(pyquant.load_pretrained(f"{folder}/empty", build), torch.ones(2, 8, device=CPU))


@flow
def improvers() -> None:
    x = batches()
    for name in ("smooth", "gptq", "bias_correction", "equalize", "search_scales"):
        on_cpu(pyquant.quantize_(perceptron(), "W4A8(symmetric_inputs=False)", data=x, improve=(name,)), x[0])
    model = pyquant.insert_fake_quantize_(perceptron(), "W4A16(symmetric=False)")
    pyquant.learn_rounding_(model, x, 3, steps=2)
    on_cpu(pyquant.convert_(model), x[0])
    weight = perceptron()[0].weight
    codes, scale, _ = pyquant.gptq_codes(weight, pyquant.W4A8().weights, x[0])
    assert codes.device == scale.device == CPU


class Stream(nn.Module):
    """A residual stream of 24 channels, of which a rotation is a Hadamard matrix times a random one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 24), nn.RMSNorm(24)
        self.up, self.down, self.head = nn.Linear(24, 64), nn.Linear(64, 24), nn.Linear(24, 32, bias=False)
        self.last = nn.LayerNorm(24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.last(x + self.down(torch.relu(self.up(self.norm(x))))))


@flow
def rotations() -> None:
    ids = [torch.randint(32, (2, 8), device=CPU) for _ in range(4)]
    spec = pyquant.RotationSpec(["embed", "down"], {"norm": ["up"], "last": ["head"]}, online=["down"])
    with CPU:
        model, other = Stream().eval(), Stream().eval()
    pyquant.rotate_(model, ids[0], spec)
    on_cpu(pyquant.quantize_(model, "W4A4Dynamic", heads=True), ids[0])
    plain = pyquant.RotationSpec(spec.writers, spec.readers)
    pyquant.learn_rotation_(other, "W4A4Dynamic", ids, 4, plain, steps=2)
    on_cpu(other, ids[0])


@flow
def training() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    for name in ("W8A8", "W8A8Dynamic", "W4A4Dynamic"):
        for forward in ("simulated", "int8") if name == "W8A8Dynamic" else ("simulated",):
            model = pyquant.prepare_qat_(perceptron().train(), name, forward=forward)
            if "Dynamic" not in name:
                pyquant.QuantizationCalibrator().calibrate_model(model, batches(), num_calib_batches=3)
            with pyquant.QATMonitor(model, every=1) as monitor:
                pyquant.finetune(model, loss, batches(), lr=1e-3, steps=4, on_step=monitor)
            assert monitor.rows
            on_cpu(pyquant.convert_(model), batches()[0])


@flow
def fusion() -> None:
    x = batches()
    for name in ("W8A8", "W8A8Dynamic"):
        model = pyquant.quantize_(perceptron(), name, data=x)
        pyquant.fuse_(model)
        on_cpu(model, x[0])
        if name == "W8A8":
            pyquant.link_(model, x[0])
            on_cpu(model, x[0])


@flow
def looks() -> None:
    x, model = batches(), perceptron()
    quantised = pyquant.quantize_(copy.deepcopy(model), "W8A8", data=x)
    pyquant.error_report(quantised, model, x, num_batches=2)
    pyquant.quantization_report(quantised)
    pyquant.compare_speed(quantised, x[0], seconds=0.01)


@flow
def choices() -> None:
    x = batches()
    found = pyquant.sensitivity(perceptron(), x, formats=("int8",), num_batches=2)
    assert found
    latencies = pyquant.measure_latency(
        perceptron(), x[0], ("float", "int8"), x, num_batches=2, rounds=1, min_rounds=1, held_out=1
    )
    plan = pyquant.search(
        perceptron(), x[0], x, formats=("float", "int8"), max_drop=0.5, objective="size", latency=latencies
    )
    model = perceptron()
    plan.apply_(model)
    on_cpu(model, x[0])
    model = perceptron()
    pyquant.auto_(model, x[0], measure=True, seconds=0.1)
    on_cpu(model, x[0])


@flow
def embeddings() -> None:
    with CPU:
        model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32))
    quantised = pyquant.quantize_(model, "W8A8Dynamic", embeddings=True)
    on_cpu(quantised, torch.arange(8, device=CPU))


@flow
def convolutions() -> None:
    x = batches(2, 4, 12, 12)
    for name in ("W8A8", "W8A8Dynamic", "W4A8(group_size=None)", "W8A16", "FP16"):
        with CPU:
            model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2)).eval()
        pyquant.fold_batch_norm_(model)
        on_cpu(pyquant.quantize_(model, name, data=x), x[0])


class Routed(nn.Module):
    """A bank of experts, whose tokens are shared evenly."""

    def __init__(self) -> None:
        super().__init__()
        from expert_banks import Bank

        self.experts = Bank(4, 64, 32)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(2 * len(x), device=x.device).reshape(-1, 2) % 4
        return self.experts(x, ids, torch.full(ids.shape, 0.5, device=x.device))


@flow
def experts() -> None:
    from expert_banks import register_banks

    register_banks()
    x = batches(16, 64)
    for name in ("W8A8", "W8A8Dynamic", "W4A8Dynamic(group_size=None)", "W4A16(group_size=32)"):
        with CPU:
            model = Routed().eval()
        quantised = pyquant.quantize_(model, name, data=x if name == "W8A8" else None)
        assert isinstance(quantised.experts, pyquant.QExperts)
        on_cpu(quantised, x[0])
        quantised.experts.kernel_info(16)


@flow
def recurrent() -> None:
    from torch.nn.utils.rnn import pack_padded_sequence

    x = batches(5, 3, 16)
    for kind in (nn.LSTM, nn.GRU):
        with CPU:
            model = nn.Sequential(kind(16, 8))
        try:
            quantised = pyquant.quantize_(model, "W8A8Dynamic")
        except pyquant.ArgumentError:
            quantised = pyquant.quantize_(pyquant.expose_linears_(model), "W8A8Dynamic")
        lengths = torch.tensor([5, 3, 2], device=CPU)
        y, _ = quantised[0](pack_padded_sequence(x[0], lengths))
        assert y.data.device == CPU


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names or FLOWS:
        try:
            FLOWS[name]()
            wrong = ""
        except Exception:  # every flow is told
            wrong = traceback.format_exc()
        print(json.dumps({"name": name, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
