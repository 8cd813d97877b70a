"""bench.gpu_conv without a GPU: what it times, asks of the plan, compares and says; on the simulator, whether the
kernels that it names are those that run."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_ops import cuda_ops
from launches import counted
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import gpu_conv  # noqa: E402
from bench.cpu_conv import CODES, DYNAMIC, SCHEMES, STATIC, Conv, codes_of, data_of, quantised  # noqa: E402
from pyquant import QConv2d, QTensor, _native  # noqa: E402
from pyquant.core.patches import Patches  # noqa: E402
from pyquant.errors import UnsupportedError  # noqa: E402
from pyquant.measure.environment import describe_environment  # noqa: E402
from pyquant.ops import layer_time  # noqa: E402
from pyquant.ops.plan import image_rows  # noqa: E402
from pyquant.report.records.figures import Figures  # noqa: E402
from pyquant.report.records.record import load_record  # noqa: E402

SMALL = Conv(16, 24, 3, 2, 7)
POINT = Conv(32, 16, 1, 1, 5)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small layers instead of three models."""
    monkeypatch.setattr(gpu_conv, "MODELS", {"a net": (SMALL, POINT)})


def words(out: Path, *more: str) -> list[str]:
    return ["--clock", "faked", "--rounds", "1", "--batch", "1", "3", "--model", "a net", "--out", str(out), *more]


def read(out: Path) -> Figures:
    return load_record(out / "gpu_conv.json", Figures, faked=True)


def test_layers_are_those_of_four_models_in_groups_or_not() -> None:
    assert {name: len(convs) for name, convs in gpu_conv.MODELS.items()} == {
        "ResNet-18": 9,
        "ResNet-50": 12,
        "ResNeXt-50": 7,
        "MobileNetV3": 24,
    }


def test_every_layer_batch_and_memory_format_is_a_row(layers: None, tmp_path: Path) -> None:
    assert gpu_conv.main(words(tmp_path, "--channels-first")) == 0
    rows = read(tmp_path).rows("rows")
    order = itertools.product((SMALL.name(), POINT.name()), ("channels_last", "channels first"), (1, 3))
    assert [(row["layer"], row["memory"], row["batch"]) for row in rows] == [*order]
    names = {row["name"] for row in _native.kernel_table()}
    for row in rows:
        for name in (gpu_conv.BF16, gpu_conv.NO_BIAS, *gpu_conv.KINDS):
            assert (row[f"us {name}"], row[f"ratio {name}"]) == (pytest.approx(1.0), pytest.approx(1.0))
        for kind in gpu_conv.KINDS:
            assert row[f"exact {kind}"] is True
            assert row[f"row {kind}"] in names
            assert row[f"form {kind}"] in ("given", "patches", "bytes")
    text = (tmp_path / "gpu_conv.md").read_text()
    for memory, batch in itertools.product(("channels_last", "channels first"), (1, 3)):
        assert f"## {memory}, batch {batch}\n" in text
    assert f" {str(rows[0]['row dynamic']).removeprefix('gemm_')} " in text
    assert gpu_conv.main(words(tmp_path, "--layer", "1x1")) == 0
    assert {(row["layer"], row["memory"]) for row in read(tmp_path).rows("rows")} == {(POINT.name(), "channels_last")}


@pytest.mark.parametrize("memory", gpu_conv.FORMATS)
@pytest.mark.parametrize("conv", [SMALL, POINT], ids=Conv.name)
@torch.inference_mode()
def test_the_cpu_judges_every_image_of_a_larger_batch(conv: Conv, memory: str) -> None:
    """As the whole batch would: images do not depend on each other."""
    runs, wanted = gpu_conv.candidates(conv, 5, 2, memory, "cpu")
    few, _ = gpu_conv.candidates(conv, 2, 2, memory, "cpu")
    assert set(wanted) == set(gpu_conv.KINDS)
    for kind, want in wanted.items():
        got, first = data_of(runs[kind]()), data_of(few[kind]())
        assert got.dtype == (torch.int8 if kind == CODES else torch.bfloat16)
        assert torch.equal(got, want)
        assert torch.equal(got[2:4], first)
        assert not torch.equal(got[0], got[1])
    near, bare = runs[gpu_conv.BF16]().float(), runs[gpu_conv.NO_BIAS]().float()
    for kind in (DYNAMIC, STATIC):
        assert (near - runs[kind]().float()).square().mean() < 1e-3 * near.square().mean()
    of_channels = near - bare
    assert of_channels.std((0, 2, 3)).max() < 0.01 < of_channels.abs().max()


def test_what_is_timed_can_be_captured_and_lies_as_it_says() -> None:
    """Codes bring the layer's own scale: another one would be read back from the GPU in every call."""
    for memory, batch in itertools.product(gpu_conv.FORMATS, (1, 3)):
        runs, _ = gpu_conv.candidates(SMALL, batch, 1, memory, "cpu")
        for kind in gpu_conv.KINDS:
            (x,) = runs[kind].args  # type: ignore[attr-defined]
            assert data_of(x).is_contiguous(memory_format=gpu_conv.FORMATS[memory])
            assert isinstance(x, QTensor) == (kind == CODES)
        assert x.scale.data_ptr() == runs[CODES].func.input_scale.data_ptr()  # type: ignore[attr-defined]
        (x,) = runs[gpu_conv.BF16].args  # type: ignore[attr-defined]
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert x.dtype == torch.bfloat16


class OneBit(torch.nn.Module):
    """A layer whose last number has another last bit."""

    def __init__(self, layer: QConv2d) -> None:
        super().__init__()
        self.layer, self.input_scale = layer, layer.input_scale

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        data = data_of(y)
        data[-1, -1, -1, -1].view(torch.int8 if data.dtype == torch.int8 else torch.int16).bitwise_xor_(1)
        return y


@pytest.mark.parametrize("kind", gpu_conv.KINDS)
def test_one_wrong_bit_is_named(layers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    moved = gpu_conv.moved

    def planted(layer: QConv2d, device: str) -> Any:
        there = moved(layer, device)
        return OneBit(there) if layer.scheme is SCHEMES[kind] and layer.in_channels == SMALL.channels else there

    monkeypatch.setattr(gpu_conv, "moved", planted)
    assert gpu_conv.main(words(tmp_path)) == 1
    for row in read(tmp_path).rows("rows"):
        wrong = [name for name in gpu_conv.KINDS if not row[f"exact {name}"]]
        assert wrong == ([kind] if row["layer"] == SMALL.name() else [])
    text = (tmp_path / "gpu_conv.md").read_text()
    assert text.count(f"| NO: {kind} ") == 2
    assert text.count("| yes ") == 2


def test_memory_is_what_a_warm_call_adds_at_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: done.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 11 << 19)
    assert gpu_conv._mib(lambda: done.append("run"), "cuda") == 2.5
    assert done == ["run", "wait", "reset", "run", "wait"]


def test_minus_zero_is_another_number() -> None:
    zero = torch.zeros(2, dtype=torch.bfloat16)
    assert gpu_conv.has_bits(zero, zero.clone())
    assert not gpu_conv.has_bits(-zero, zero)


def test_a_layer_that_no_kernel_takes_is_named_and_the_others_are_timed(
    layers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = gpu_conv.moved

    def refusing(layer: QConv2d, device: str) -> QConv2d:
        if layer.in_channels == SMALL.channels:
            raise UnsupportedError("no kernel for a convolution in groups on cuda:0", ["2 groups; it takes 1"])
        return moved(layer, device)

    monkeypatch.setattr(gpu_conv, "moved", refusing)
    assert gpu_conv.main(words(tmp_path)) == 1
    found = read(tmp_path)
    assert {row["layer"] for row in found.rows("rows")} == {POINT.name()}
    why = "no kernel for a convolution in groups on cuda:0"
    assert {row["name"]: row["value"] for row in found.rows("failed")} == {
        f"a net {SMALL.name()}, channels_last, batch {batch}": why for batch in (1, 3)
    }
    assert f"- a net {SMALL.name()}, channels_last, batch 3 failed: {why}" in (tmp_path / "gpu_conv.md").read_text()


def test_a_killed_run_keeps_what_it_timed(layers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, done = gpu_conv.timed, []

    def killed(model: str, conv: Conv, batch: int, first: int, *rest: Any) -> gpu_conv.GpuConvRow:
        assert first == 1
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(batch)
        return timed(model, conv, batch, first, *rest)

    monkeypatch.setattr(gpu_conv, "timed", killed)
    with pytest.raises(KeyboardInterrupt):
        gpu_conv.main(words(tmp_path))
    assert [row["batch"] for row in read(tmp_path).rows("rows")] == done == [1, 3, 1]


def test_the_page_says_what_is_slower_and_by_which_kernel() -> None:
    def row(layer: str, ratio: float, **of_codes: dict[str, str]) -> gpu_conv.GpuConvRow:
        names = (gpu_conv.BF16, gpu_conv.NO_BIAS, *gpu_conv.KINDS)
        shares = dict.fromkeys(names, 1.0) | {STATIC: ratio}
        kernels = dict.fromkeys(gpu_conv.KINDS, "given"), dict.fromkeys(gpu_conv.KINDS, "gemm_a")
        form, name = (held | of_codes.get(what, {}) for held, what in zip(kernels, ("form", "row"), strict=True))
        us, mib = {name: 8 / share for name, share in shares.items()}, dict.fromkeys(names, 2.5)
        return gpu_conv.GpuConvRow(
            "net", layer, gpu_conv.LAST, 8, us, shares, mib, form, name, dict.fromkeys(gpu_conv.KINDS, True)
        )

    other = {"form": {CODES: "patches"}, "row": {CODES: "gemm_b"}}
    rows = [row("one", 0.5), row("two", 2.0, **other), row("three", 8.0)]
    text = gpu_conv.markdown(gpu_conv.GpuConvReport(describe_environment("cpu"), rows))
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    assert ["", "channels_last", "8", "static", "3", "2.00", "1", "0.50: net one", ""] in cells
    (first,), (second,) = ([line for line in cells if line[1:3] == ["net", name]] for name in ("one", "two"))
    assert first[6] == "16.0 (0.50x)"
    assert first[8:10] == ["2.5 / 2.5 / 2.5 / 2.5", "given a"]
    assert second[9] == "dynamic, static: given a; codes: patches b"


CASES = (
    SMALL,
    POINT,
    Conv(64, 64, 3, 1, 6),
    Conv(32, 72, 1, 2, 6),
    Conv(64, 128, 1, 1, 24),
    Conv(3, 16, 7, 2, 11),
    Conv(24, 72, 1, 1, 4),
    Conv(20, 16, 1, 1, 4),
)


@pytest.mark.parametrize("conv", CASES, ids=Conv.name)
def test_the_plan_is_asked_about_the_padded_images(conv: Conv) -> None:
    for batch in (1, 8):
        entry, problem = gpu_conv.problem_of(conv, batch, SCHEMES[STATIC], torch.bfloat16)
        window = Patches.make(conv.kernel, conv.stride, conv.kernel // 2)
        rows = window.gather(torch.zeros(batch, conv.size, conv.size, conv.channels))
        assert (problem["m"], problem["k"]) == rows.shape
        assert (problem["n"], problem["ldo"], problem["ldx"]) == (conv.out, conv.out, conv.channels)
        assert problem["x_align"] == max(p for p in (1, 2, 4, 8, 16) if conv.channels % p == 0)
        assert entry == ("linear" if conv.kernel == conv.stride == 1 else "conv")
        full = conv.size + 2 * (conv.kernel // 2)
        image = image_rows(window, full, full, conv.channels)
        assert problem.get("image") == (image if entry == "conv" else None)


def test_each_kind_is_asked_about_with_its_scales_and_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def route(entry: str, problem: dict[str, Any], device: Any, *, only_compiled: bool) -> tuple[str, str | None]:
        asked.append(problem)
        return "given", None if problem["out"] == "s8" else "a row"

    monkeypatch.setattr(gpu_conv, "_native", SimpleNamespace(route=route))
    found = gpu_conv.routes(SMALL, 1, {}, only_compiled=True)
    assert found == {DYNAMIC: ("given", "a row"), STATIC: ("given", "a row"), CODES: ("given", "none")}
    assert [(problem["out"], problem["per_token_scale"]) for problem in asked] == [
        ("bf16", True),
        ("bf16", False),
        ("s8", False),
    ]
    assert [problem["has_zero_point"] for problem in asked] == [False, True, True]


@pytest.mark.parametrize("conv", [*CASES, Conv(16, 16, 3, 1, 5, 16), Conv(32, 64, 3, 2, 5, 4)], ids=Conv.name)
def test_the_named_kernel_is_the_one_that_runs(conv: Conv) -> None:
    device = cuda_ops()
    if isinstance(device, str) or not device.is_simulator:
        pytest.skip("only the simulator says what was launched")
    tiles = {row["name"]: row["tile"] for row in _native.kernel_table()}
    found = gpu_conv.routes(conv, 2, _native.device_info(0), only_compiled=True)
    x = torch.randn(2, conv.channels, conv.size, conv.size).to(torch.bfloat16).to(memory_format=torch.channels_last)
    for kind, layer in quantised(conv.module()).items():
        kernels = _launched(device, conv, kind, layer, codes_of(x, layer).data if kind == CODES else x)
        form, name = found[kind]
        if conv.groups > 1:
            assert (form, name) == gpu_conv.IN_GROUPS
            assert "grouped_conv" in kernels
            continue
        assert ("gather_patches" in kernels) == (form != "given"), (form, kernels)
        m, n, k = tiles[name]
        is_decode = "_decode_" in name
        assert (f"DecodeS8S8ELi{n}ELi{m}E" if is_decode else f"GemmShapeILi{m}ELi{n}ELi{k}E") in kernels, (
            name,
            kernels,
        )
        assert ("gemm_conv80" in kernels) == ("_conv_" in name), (name, kernels)


def _launched(device: Any, conv: Conv, kind: str, layer: QConv2d, x: Tensor) -> str:
    """The kernels that the layer's op launches on the simulator."""
    spec = layer_time.spec_of(SCHEMES[kind], conv.out, layer.codes.shape[1], None)
    spec = replace(spec, has_bias=True, codes_out=kind == CODES)
    packed = device.pack_linear(
        layer.codes,
        layer.weight_scale,
        spec.to_ints(),
        layer.bias,
        layer.input_scale,
        None,
        layer.output_scale,
        None,
    )
    operands = (device.put(x), device.put(packed), None, spec.to_ints(), layer.patches.to_ints())
    _, kernels = counted(lambda: torch.ops.pyquant_sim.qconv2d.default(*operands))
    return str(kernels)
