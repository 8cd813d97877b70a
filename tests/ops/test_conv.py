"""The fused convolution: memory formats, codes, rounds of images, no patches in memory, refusals.

Equality with an independent reference over random geometry and every scheme is in tests/nn/test_qconv.py, with every
instruction set and the fallback in test_invariance.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyquant import QConv2d, ops
from pyquant.core.patches import Patches
from pyquant.core.presets import W4A8, W8A8, W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.nn.patches import unsupported
from pyquant.ops.conv import by_patches

SCHEMES = (W8A8Dynamic(), W8A8Dynamic(symmetric_inputs=False), W8A8(symmetric_inputs=False), W4A8(4))
LAST = torch.channels_last


def made(scheme: QScheme, channels: int, out: int, **geometry: Any) -> QConv2d:
    torch.manual_seed(channels)
    given = {"input_scale": 0.03, "input_zero_point": 9 if scheme == SCHEMES[2] else None} if scheme.is_static else {}
    return QConv2d.from_float(nn.Conv2d(channels, out, **geometry), scheme, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_formats_change_the_strides_and_no_bit(scheme: QScheme, dtype: torch.dtype) -> None:
    for channels, out, geometry in (
        (4, 1, {"kernel_size": 1}),
        (68, 130, {"kernel_size": 1}),
        (20, 64, {"kernel_size": 3, "padding": 1}),
        (4, 100, {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2)}),
        (4, 65, {"kernel_size": (2, 5), "stride": (3, 2), "dilation": (2, 1), "padding": (2, 6)}),
    ):
        layer = made(scheme, channels, out, **geometry)
        x = torch.randn(3, channels, 11, 13).to(dtype)
        want = layer.reference(x)
        residual = torch.randn(want.shape)
        added = layer.reference(x, residual)
        wide = torch.randn(3, channels, 11, 26).to(dtype)
        wide[..., ::2] = x
        for given, last in ((x, False), (x.to(memory_format=LAST), True), (wide[..., ::2], False)):
            y = layer(given)
            assert torch.equal(y, want)
            assert y.is_contiguous(memory_format=LAST) if last else y.is_contiguous()
            for r in (residual, residual.to(memory_format=LAST)):
                assert torch.equal(layer(given, r), added)
        for image in range(3):
            assert torch.equal(layer(x[image]), want[image])


def test_codes_of_both_memory_formats() -> None:
    for scheme, zero in ((SCHEMES[2], 9), (SCHEMES[1], -3), (SCHEMES[0], None)):
        layer = made(scheme, 20, 66, kernel_size=3, padding=2, stride=2)
        codes = torch.randint(-127, 128, (2, 20, 9, 8), dtype=torch.int8)
        scale = torch.tensor([0.03]) if scheme.is_static else torch.tensor([0.1, 0.7])
        zero_point = None if zero is None else torch.full_like(scale, zero, dtype=torch.int32)
        want = layer.reference(QTensor(codes, scale, zero_point))
        for given in (codes, codes.to(memory_format=LAST)):
            assert torch.equal(layer(QTensor(given, scale, zero_point)), want)


def test_images_beyond_one_round_equal_images_alone() -> None:
    """4 MiB of codes are quantised and multiplied at a time: here two images, then one."""
    for scheme in SCHEMES[:3]:
        layer = made(scheme, 64, 2, kernel_size=(1, 2), stride=5, padding=1)
        x = torch.randn(3, 64, 170, 180) * torch.tensor([1.0, 3.0, 0.1]).reshape(3, 1, 1, 1)
        for given in (x, x.to(memory_format=LAST)):
            y = layer(given)
            for image in range(3):
                assert torch.equal(y[image], layer(given[image : image + 1])[0])


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_poisoned_image_poisons_itself_alone(symmetric: bool) -> None:
    layer = made(W8A8Dynamic(symmetric_inputs=symmetric), 4, 5, kernel_size=3, padding=1)
    x = torch.randn(3, 4, 6, 6)
    whole = layer(x)
    for value in (float("nan"), float("inf")):
        for given in (x.clone(), x.clone(memory_format=LAST)):
            given[1, 2, 3, 4] = value
            y = layer(given)
            assert y[1].isnan().all()
            assert torch.equal(y[::2], whole[::2])


@pytest.mark.parametrize("shape", [(0, 4, 6, 6), (2, 4, 0, 3)], ids=str)
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    for scheme in SCHEMES[:3]:
        layer, x = made(scheme, 4, 5, kernel_size=2, padding=1), torch.zeros(shape)
        assert torch.equal(layer(x), layer.reference(x))
    nothing = QConv2d.from_codes(
        torch.zeros(5, 0, dtype=torch.int8), torch.ones(5), patches=Patches((2, 2)), scheme=W8A8Dynamic()
    )
    assert torch.equal(nothing(torch.zeros(2, 0, 6, 6)), torch.zeros(2, 5, 5, 5))


PEAK = """
import torch
from torch import nn
import pyquant
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
torch.set_num_threads(2)
for scheme, given in ((pyquant.W8A8Dynamic(), {}), (pyquant.W8A8(), {"input_scale": 0.02})):
    layer = pyquant.QConv2d.from_float(nn.Conv2d(64, 8, 5, padding=2), scheme, **given)
    for format in (torch.contiguous_format, torch.channels_last):
        layer(torch.randn(1, 64, 32, 32).to(memory_format=format))
        x = torch.randn(1, 64, 384, 384).to(memory_format=format)
        before = peak()
        layer(x)
        print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_patches_in_memory() -> None:
    """The image has 9 MiB of codes, the result 4.5 MiB, and a matrix of patches would have 225 MiB."""
    if not ops.native_available():
        pytest.skip(f"compiled library not in use: {ops.why_not_native()}")
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    grown = [float(line) for line in out.split()]
    assert len(grown) == 4
    assert max(grown) < 60, grown


def packed(**words: Any) -> tuple[Tensor, list[int]]:
    spec = list(ops.LinearSpec(3, 8, layout=ops.layout_for(torch.device("cpu")), **words).to_ints())
    x_scale = torch.ones(1) if words.get("input") == "static" else None
    out_scale = torch.ones(1) if words.get("codes_out") else None
    w = torch.ones(3, 8, dtype=torch.int8)
    return ops.pack_linear(w, torch.ones(3), spec, x_scale=x_scale, out_scale=out_scale), spec


Edit = Callable[[dict[str, Any]], object]
WINDOW = Patches((2, 2))
IMAGES = torch.zeros(2, 2, 3, 3)


@pytest.mark.parametrize(
    ("edit", "argument", "words"),
    [
        (lambda a: a.update(window=[1, 2, 3]), "window", {}),
        (lambda a: a.update(window="2x2"), "window", {}),
        (lambda a: a.update(spec="8"), "spec", {}),
        *[
            (lambda a, i=i: a["window"].__setitem__(i, -1 if 4 <= i < 8 else 0), "window", {})  # type: ignore[misc]
            for i in range(11)
        ],
        (lambda a: a["window"].__setitem__(10, 2), "window", {}),
        (lambda a: a["window"].__setitem__(4, 2**31), "window", {}),
        (lambda a: a["window"].__setitem__(0, 3), "window", {}),
        (lambda a: a.update(x=torch.zeros(2, 3, 3, 3)), "x", {}),
        (lambda a: a.update(x=torch.zeros(2, 2, 1, 3)), "x", {}),
        (lambda a: a.update(x=torch.zeros(2, 3, 3)), "x", {}),
        (lambda a: a.update(x=IMAGES.to(torch.int8)), "x", {}),
        (lambda a: a.update(x=IMAGES.to(torch.uint8)), "x", {"input": "static"}),
        (lambda a: a.update(x_scale=torch.ones(2)), "x", {}),
        (lambda a: a.update(x=IMAGES.to(torch.int8), x_scale=torch.ones(2)), "x_scale", {"input": "static"}),
        (lambda a: a.update(x=IMAGES.to(torch.int8), x_scale=torch.ones(1)), "x_scale", {}),
        (
            lambda a: a.update(
                x=IMAGES.to(torch.int8), x_scale=torch.ones(2), x_zero_point=torch.zeros(2, dtype=torch.int32)
            ),
            "x_zero_point",
            {},
        ),
        (
            lambda a: a.update(
                x=IMAGES.to(torch.int8), x_scale=torch.ones(2), x_zero_point=torch.tensor([0, 128], dtype=torch.int32)
            ),
            "x_zero_point",
            {"x_symmetric": False, "x_qmin": -128},
        ),
        (lambda a: a.update(residual=torch.zeros(2, 3, 2, 3)), "residual", {}),
        (lambda a: a.update(residual=torch.zeros(2, 3, 2, 2).long()), "residual", {}),
        (lambda a: a.update(packed=a["packed"][1:]), "packed", {}),
        (lambda a: a.update(out_dtype=torch.int8), "out_dtype", {}),
        (lambda a: a.update(out_dtype=torch.float32), "out_dtype", {"codes_out": True}),
    ],
)
def test_wrong_operands_are_refused_by_name(edit: Edit, argument: str, words: dict[str, Any]) -> None:
    buffer, spec = packed(**words)
    call: dict[str, Any] = {"x": IMAGES, "packed": buffer, "spec": spec, "window": list(WINDOW.to_ints())}
    ops.qconv2d(**call)
    edit(call)
    with pytest.raises(ArgumentError) as caught:
        ops.qconv2d(**call)
    assert caught.value.argument == argument, caught.value
    if isinstance(call["spec"], list) and isinstance(call["window"], list) and argument != "x_zero_point":
        with pytest.raises(ArgumentError) as ruled:  # the rule says the same as the kernel
            torch.ops.pyquant.qconv2d(**{"residual": None} | {k: meta(v) for k, v in call.items()})
        assert ruled.value.argument == argument


def meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def test_groups_without_a_kernel_are_refused() -> None:
    """As where the library was built without CUDA."""
    buffer, spec = packed()
    operands = (torch.zeros(1, 6, 3, 3), buffer, None, spec, Patches((2, 2), groups=3).to_ints())
    assert ops.qconv2d(*operands).shape == (1, 3, 2, 2)
    with pytest.raises(UnsupportedError, match="3 groups; it takes 1 on cpu"):
        by_patches(*operands)
    assert unsupported(nn.Conv2d(4, 4, 3, groups=4)) is None
    assert "'circular'" in str(unsupported(nn.Conv2d(4, 4, 3, padding_mode="circular")))


def test_a_window_travels() -> None:
    window = Patches((1, 2), (3, 4), (5, 6, 7, 8), (9, 10), 11)
    assert window.to_ints() == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    assert Patches.from_ints(window.to_ints()) == window


def test_in_a_compiled_graph_with_sizes_that_change() -> None:
    layer = made(W8A8Dynamic(), 4, 5, kernel_size=3, padding=1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for size in ((2, 4, 6, 7), (3, 4, 9, 5)):
            x = torch.randn(size)
            for given in (x, x.to(memory_format=LAST)):
                y = compiled(given)
                assert torch.equal(y, layer(given))
                assert y.stride() == layer(given).stride()
