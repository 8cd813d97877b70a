"""FakeQuantConv2d and FakeQuantResidual: what they round to is what the integer layers compute with."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.pretrained import save as pretrained
from pyquant.nn.chain import QResidual, Residual
from pyquant.nn.qconv import QConv2d
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.conv import FakeQuantConv2d
from pyquant.simulate.insert import convert_, insert_fake_quantize_, remove_fake_quantize_
from pyquant.simulate.residual import FakeQuantResidual

AFFINE = pyquant.W8A8(symmetric_inputs=False)
CONFIGS = {
    "W8A8": pyquant.W8A8(),
    "affine": AFFINE,
    "dynamic": pyquant.W8A8Dynamic(),
    "W4A8 groups": pyquant.W4A8(group_size=9),
    "W4A4": pyquant.W4A4(),
    "weight-only": pyquant.W8A16(),
    "per tensor": QScheme(TensorScheme(), TensorScheme()),
    "mse": QScheme(TensorScheme(bits=4, granularity="per_channel", calibrator="mse"), TensorScheme()),
}


class Net(nn.Module):
    """Convolutions, a residual block, a head: what a ResNet consists of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.conv = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.add = pyquant.QResidualAdd(nn.Conv2d(4, 4, 3, padding=1), "relu")
        self.down = nn.Conv2d(4, 6, 1, stride=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.down(self.add(self.conv(x), x)).mean((2, 3)))


def in_groups() -> nn.Module:
    """What a MobileNet consists of: depthwise and pointwise convolutions, and groups of several channels."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 1),
        nn.Conv2d(12, 6, (3, 1), padding=(1, 0), groups=3),
    )


def images(seed: int = 0) -> Tensor:
    return torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CONFIGS)
def test_converted_convolutions_have_the_codes_of_the_simulation(name: str) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 9, 3, stride=2), nn.ReLU(), nn.Conv2d(9, 4, 1)
    )
    net = calibrate_(insert_fake_quantize_(net, CONFIGS[name]), [images()], 1)
    x = images(1)
    simulated = net(x)
    weights = {
        i: net[i].weight_fake_quant(net[i].weight.permute(0, 2, 3, 1).reshape(len(net[i].weight), -1))
        for i in (0, 2, 4)
    }
    state = {k for k in net.state_dict() if k.endswith(("weight", "bias"))}
    convert_(net)
    for i, matrix in weights.items():
        assert isinstance(net[i], QConv2d)
        assert torch.equal(net[i].dequantised_weight(), matrix)
    assert torch.allclose(net(x), simulated, rtol=1e-3, atol=2e-2 if "A4" in name else 1e-2)
    assert state == {f"{i}.{what}" for i in (0, 2, 4) for what in ("weight", "bias")}


def test_codes_equal_those_of_quantize_() -> None:
    a, b = Net().eval(), Net().eval()
    convert_(insert_fake_quantize_(a, pyquant.W8A8Dynamic()))
    pyquant.quantize_(b, pyquant.W8A8Dynamic())
    assert torch.equal(a.conv[0].weight, b.conv[0].weight)
    assert torch.equal(a(images()), b(images()))
    assert type(a.add.residual) is type(b.add.residual) is Residual


def test_parameters_are_shared_and_gradients_pass() -> None:
    net = Net()
    weight = net.conv[0].weight
    insert_fake_quantize_(net, AFFINE)
    assert net.conv[0].weight is weight
    calibrate_(net, [images()], 1)
    net(images()).square().sum().backward()
    assert weight.grad.abs().sum() > 0
    assert isinstance(net.add.residual, FakeQuantResidual)
    remove_fake_quantize_(net)
    assert type(net.conv[0]) is nn.Conv2d
    assert net.conv[0].weight is weight
    assert type(net.add.residual) is Residual
    assert net(images()).shape == (3, 5)


def test_an_image_has_a_range_of_its_own_under_a_dynamic_scheme() -> None:
    layer = FakeQuantConv2d.from_float(nn.Conv2d(3, 4, 3), pyquant.W8A8Dynamic())
    x = images()
    x[1] *= 100
    y = layer(x)
    for i in range(3):
        torch.testing.assert_close(layer(x[i]), y[i], rtol=1e-4, atol=1e-4 * float(y[i].detach().abs().max()))
        torch.testing.assert_close(
            layer.to_quantized()(x[i]), y[i], rtol=1e-4, atol=1e-4 * float(y[i].detach().abs().max())
        )


def test_it_compiles_without_graph_breaks() -> None:
    for scheme in (AFFINE, pyquant.W8A8Dynamic()):
        net = calibrate_(insert_fake_quantize_(Net().eval(), scheme), [images()], 1)
        compiled = torch.compile(net, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(images(1)), net(images(1)))


def test_memory_formats_and_images_without_a_batch() -> None:
    layer = FakeQuantConv2d.from_float(nn.Conv2d(3, 4, 3, padding="same"), AFFINE)
    layer.input_fake_quant.set_qparams(torch.tensor([0.02]), torch.tensor([5]))  # type: ignore[union-attr]
    x = images()
    torch.testing.assert_close(layer(x.to(memory_format=torch.channels_last)), layer(x))
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    torch.testing.assert_close(layer.to_quantized()(x[0]), layer(x)[0], rtol=1e-4, atol=1e-4)


def test_malformed_residuals_in_a_file_are_refused(tmp_path: Path) -> None:
    model = whole()
    scheme = model.add.residual.scheme.to_dict()  # type: ignore[union-attr]
    for number, (name, words, told) in enumerate(
        [
            ("add.residual", {**scheme, "bits": 5}, "bits"),
            ("add.residual", 3, "TensorScheme"),
            ("add.other", scheme, "scale"),
            ("add.residual", {**scheme, "dynamic": True}, "per_tensor"),
        ]
    ):
        folder = tmp_path / str(number)
        save_checkpoint = pretrained.save_checkpoint

        def forged(*args: Any, extra: Any, name: str = name, words: Any = words, **more: Any) -> str:
            extra["pyquant_modules"]["residuals"] = {name: words}
            return save_checkpoint(*args, extra=extra, **more)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pretrained, "save_checkpoint", forged)
            pyquant.save_pretrained(model, folder)
        with pytest.raises(CheckpointError, match=told):
            pyquant.load_pretrained(folder, Net)


def whole(scheme: QScheme = AFFINE) -> nn.Module:
    net = calibrate_(insert_fake_quantize_(Net().eval(), scheme), [images(), images(1)], 2)
    return pyquant.fuse_(convert_(net))


def test_the_residual_block_is_linked_from_end_to_end() -> None:
    net = calibrate_(insert_fake_quantize_(Net().eval(), AFFINE), [images(), images(1)], 2)
    simulated = net(images(1))
    # one tensor, one range: the block's input and its skip branch agree without being told
    assert net.conv[0].input_fake_quant.scale == net.add.residual.input_fake_quant.scale
    model = pyquant.fuse_(convert_(net))
    assert isinstance(model.add.residual, QResidual)
    expected = model(images(1))
    torch.testing.assert_close(expected, simulated, rtol=1e-3, atol=1e-2)
    states = [r.state for r in pyquant.chain_report(model, images(1))]
    assert states == ["linkable"] * 3 + ["broken", "end"]
    pyquant.link_(model, images(1))
    assert torch.equal(model(images(1)), expected)
    assert [r.state for r in pyquant.chain_report(model, images(1))] == ["linked"] * 3 + ["broken", "end"]
    assert model.add.relu_is_free


@pytest.mark.parametrize("linked", [False, True])
def test_round_trip_through_a_checkpoint(tmp_path: Path, linked: bool) -> None:
    model = whole()
    if linked:
        pyquant.link_(model, images())
    pyquant.save_pretrained(model, tmp_path)
    again = pyquant.load_pretrained(tmp_path, Net).eval()
    assert torch.equal(again(images()), model(images()))
    assert isinstance(again.add.residual, QResidual)
    with torch.device("meta"):
        empty = Net()
    assert torch.equal(pyquant.load_pretrained(tmp_path, empty).eval()(images()), model(images()))
    pyquant.load_pretrained(tmp_path, again)  # into a quantised model of the same kind
    assert json.loads((tmp_path / "manifest.json").read_text())["version"] == 2


def test_a_model_that_differs_is_refused_and_stays(tmp_path: Path) -> None:
    pyquant.save_pretrained(whole(), tmp_path)

    def changed(what: str) -> nn.Module:
        net: Any = Net()
        if what == "stride":
            net.down = nn.Conv2d(4, 6, 1, stride=1)
        elif what == "padding":
            net.conv[0] = nn.Conv2d(4, 4, 3, padding=(1, 0))
        elif what == "kind":
            net.down = nn.Linear(4, 6)
        elif what == "groups":
            net.add.layer = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        else:
            net.add.residual = nn.Identity()
        return net

    for what, match in (
        ("stride", "layer 'down'"),
        ("padding", r"conv\.0"),
        ("kind", "saved conv2d; the model has a Linear"),
        ("groups", "groups=2"),
        ("residual", r"add\.residual.*Identity"),
    ):
        net = changed(what)
        before = {n: id(m) for n, m in net.named_modules()}
        with pytest.raises(CheckpointError, match=match):
            pyquant.load_pretrained(tmp_path, net)
        assert {n: id(m) for n, m in net.named_modules()} == before


def test_what_cannot_be_simulated_is_told() -> None:
    mirrored = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 4, 1))
    insert_fake_quantize_(mirrored, pyquant.W8A8Dynamic())  # a broad config leaves it alone
    assert [type(m).__name__ for m in mirrored] == ["Conv2d", "FakeQuantConv2d"]
    with pytest.raises(ArgumentError, match="padding_mode='reflect'"):
        insert_fake_quantize_(copy.deepcopy(remove_fake_quantize_(mirrored)), {"0": pyquant.W8A8Dynamic()})
    report = pyquant.quantization_report(pyquant.quantize_(mirrored, pyquant.W8A8Dynamic()))
    assert [(r.kind, "padding_mode" in r.reason) for r in report] == [("Conv2d", True), ("QConv2d", False)]
    with pytest.raises(ArgumentError, match=r"calibrated"):
        convert_(insert_fake_quantize_(Net(), AFFINE))


@pytest.mark.parametrize("scheme", [AFFINE, pyquant.W8A8Dynamic(), pyquant.W8A16()], ids=str)
def test_groups_are_simulated_converted_saved_and_loaded(scheme: QScheme, tmp_path: Path) -> None:
    net = calibrate_(insert_fake_quantize_(in_groups().eval(), scheme), [images(), images(1)], 2)
    simulated = net(images(1))
    convert_(net)
    assert [m.patches.groups for m in net if isinstance(m, QConv2d)] == [1, 8, 1, 3]
    torch.testing.assert_close(net(images(1)), simulated, rtol=1e-3, atol=1e-2)
    pyquant.save_pretrained(net, tmp_path)
    again = pyquant.load_pretrained(tmp_path, in_groups).eval()
    assert torch.equal(again(images()), net(images()))
    document = json.loads((tmp_path / "manifest.json").read_text())["layers"]
    assert [layer["geometry"].get("groups") for layer in document.values()] == [None, 8, None, 3]
    one = in_groups()
    one[5] = nn.Conv2d(4, 6, (3, 1), padding=(1, 0))  # K of another geometry
    with pytest.raises(CheckpointError, match="groups"):
        pyquant.load_pretrained(tmp_path, one)
    pyquant.dequantize_(net)
    assert [m.groups for m in net if isinstance(m, nn.Conv2d)] == [1, 8, 1, 3]


def test_improvers_take_convolutions_in_groups() -> None:
    data = [images(seed) for seed in range(4)]
    net = calibrate_(insert_fake_quantize_(in_groups().eval(), pyquant.W4A8()), data, 4)
    assert set(pyquant.gptq_(net, data, 4)) == {"0", "2", "4", "5"}
    convert_(net)
    assert isinstance(net[2], QConv2d)
