"""Numbers that a layer shows: what is written into them is what the layer computes with, however it is written."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyquant
from pyquant import QConv2d, QLinear
from pyquant.nn import state
from pyquant.nn.merged_linear import MergedLinear
from pyquant.nn.shown import Shown

SCHEMES = [pyquant.W8A8Dynamic(), pyquant.W4A8Dynamic(16), pyquant.W8A16(), pyquant.W4A16(16), pyquant.FP16()]
DTYPES = [torch.float32, torch.bfloat16]


def layer_of(scheme: pyquant.QScheme = SCHEMES[0], dtype: torch.dtype = torch.float32) -> QLinear:
    torch.manual_seed(3)
    return QLinear.from_float(nn.Linear(32, 24).to(dtype), scheme)


def add_twice(b: Tensor) -> None:
    b.add_(1)
    b.add_(1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda b: b.zero_(),
    "data": lambda b: b.data.zero_(),
    "detach": lambda b: b.detach().fill_(2),
    "init": nn.init.ones_,
    "init of a distribution": lambda b: nn.init.uniform_(b, 1, 2),
    "an element": lambda b: b.__setitem__(3, 7.0),
    "a slice": lambda b: b[4:9].mul_(3),
    "a view of a view": lambda b: b.view(2, 12)[1].clamp_(max=-1),
    "augmented": lambda b: b.__iadd__(torch.ones(24)),
    "several": add_twice,
    "out": lambda b: torch.add(torch.ones(24).to(b.dtype), 1, out=b),
    "copy_": lambda b: b.copy_(torch.arange(24)),
    "foreach": lambda b: torch._foreach_add_([b], 1.0),
    "set data": lambda b: setattr(b, "data", torch.ones(24).to(b.dtype)),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_written_is_added(scheme: pyquant.QScheme, dtype: torch.dtype, how: str) -> None:
    layer = layer_of(scheme, dtype)
    expected = nn.Parameter(layer.bias.clone(), requires_grad=False)
    memory = layer.bias_.data_ptr()
    torch.manual_seed(1)
    with torch.no_grad():
        WRITES[how](expected)
    torch.manual_seed(1)
    with torch.no_grad():
        WRITES[how](layer.bias)
    assert torch.equal(layer.bias, expected)
    assert torch.equal(layer.state_dict()["bias"], expected.float())
    if type(layer.bias) is Shown:
        assert layer.bias_.data_ptr() == memory  # which captured graphs read
    twin, x = copy.deepcopy(layer), torch.randn(5, 32, dtype=dtype)
    twin.bias = expected.detach().float()
    assert torch.equal(layer(x), twin(x))
    if not scheme.is_float:  # whose reference is the op
        assert scheme.is_weight_only or torch.equal(layer(x), layer.reference(x))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])
def test_layers_made_in_a_mode_and_written_in_it(mode: Any) -> None:
    with mode():
        layer = layer_of()
        layer.bias.zero_()
        assert torch.equal(layer(torch.zeros(1, 32)), torch.zeros(1, 24))
    late = layer_of()
    with mode():
        late.bias.zero_()
    assert torch.equal(late(torch.zeros(1, 32)), torch.zeros(1, 24))


def test_what_is_not_written_keeps_the_digits_that_were_not_shown() -> None:
    layer = layer_of().bfloat16()
    held = layer.bias_.clone()
    layer.bias[3] = 1
    held[3] = 1
    assert torch.equal(layer.bias_, held)
    assert not torch.equal(held, held.bfloat16().float())


def test_a_convolution_takes_what_is_written() -> None:
    conv = QConv2d.from_float(nn.Conv2d(4, 8, 3), pyquant.W8A8Dynamic())
    with torch.no_grad():
        conv.bias.fill_(0.5)
    assert torch.equal(conv(torch.zeros(1, 4, 5, 5)), torch.full((1, 8, 3, 3), 0.5))


def test_a_former_bias_is_no_longer_the_layers() -> None:
    layer = layer_of()
    former = layer.bias
    layer.bias = torch.ones(24)
    former.zero_()
    assert torch.equal(layer.bias, torch.ones(24))


def test_what_is_computed_or_copied_is_an_ordinary_tensor() -> None:
    layer, x = layer_of(), torch.randn(3, 32)
    before, bias = layer(x), layer.bias
    for made in (bias + 1, bias.clone(), bias.double(), bias.to("meta"), copy.deepcopy(bias), F.relu(bias)):
        assert type(made) is Tensor
    (bias + 1).zero_()
    copy.deepcopy(bias).zero_()
    assert type(pickle.loads(pickle.dumps(bias))) is Tensor
    torch.save(bias, file := io.BytesIO())
    assert torch.equal(torch.load(io.BytesIO(file.getvalue()), weights_only=True), bias)
    assert torch.equal(layer(x), before)


def test_a_parameter_may_be_made_of_it_and_learns() -> None:
    layer = layer_of(dtype=torch.bfloat16)
    for bias in (layer.bias, layer.bias.clone()):
        own = nn.Linear(32, 24, dtype=torch.bfloat16)
        own.bias = nn.Parameter(bias)
        own(torch.ones(2, 32, dtype=torch.bfloat16)).sum().backward()
        assert own.bias.grad is not None
        assert torch.equal(own.bias.grad, torch.full((24,), 2.0))


@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=str)
def test_no_gradient_is_promised_that_is_not_computed(scheme: pyquant.QScheme) -> None:
    layer = layer_of(scheme)
    for ask in (lambda b: b.requires_grad_(), lambda b: setattr(b, "requires_grad", True)):
        with pytest.raises(pyquant.UnsupportedError, match=r"gradient of the bias.*frozen"):
            ask(layer.bias)
    assert not layer.bias.requires_grad_(False).requires_grad


def test_sixteen_bits_learn_a_bias() -> None:
    layer = layer_of(pyquant.FP16())
    layer.bias.requires_grad_()
    layer(torch.ones(2, 32)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((24,), 2.0))


class Reads(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.layer.bias, x, self.layer.weight.T)


def test_torch_fx_and_jit_record_it() -> None:
    model, x = Reads(layer_of()), torch.randn(3, 32)
    for made in (torch.fx.symbolic_trace(model), torch.jit.trace(model, (x,))):
        assert torch.equal(made(x), model(x))


class Named(Tensor):
    pass


@pytest.mark.parametrize("kind", [Named, nn.Parameter])
def test_another_subclass_of_tensor_meets_it(kind: Any) -> None:
    layer = layer_of()
    x = torch.randn(3, 32).as_subclass(kind) if kind is Named else nn.Parameter(torch.randn(3, 32))
    y = F.linear(x, layer.weight, layer.bias)
    assert isinstance(y, Named) == (kind is Named)
    assert torch.equal(y, Reads(layer)(x.as_subclass(Tensor)))


def test_a_layer_of_two_threads_of_shown_biases_holds_a_plain_one() -> None:
    layer, other = layer_of(), layer_of()
    layer.bias = layer.bias
    other.bias = layer.bias
    assert type(layer.bias_) is type(other.bias_) is Tensor
    assert isinstance(layer.bias, Shown)


AFFINE = {
    "weight_zero_point": pyquant.W4A16(16, symmetric=False),
    "input_zero_point": pyquant.W8A8(symmetric_inputs=False),
}
INTEGERS = [pyquant.W8A8(), pyquant.W4A8(16), pyquant.W4A8TwoLevelDynamic(32), pyquant.W8A16(), *AFFINE.values()]
NUMBERS = ("weight_scale", "weight_zero_point", "input_scale", "input_zero_point")
HELD = [(scheme, name) for scheme in INTEGERS for name in NUMBERS if name in state.slots(scheme, 24, 64, True)]


def calibrated(scheme: pyquant.QScheme) -> QLinear:
    numbers: dict[str, Any] = {}
    if scheme.inputs is not None and not scheme.inputs.dynamic:
        numbers = {"input_scale": 0.05} | ({} if scheme.inputs.symmetric else {"input_zero_point": 3})
    return QLinear.from_float(nn.Linear(64, 24), scheme, **numbers)


SCALED: dict[str, Callable[[Tensor, int], Any]] = {
    "mul_": lambda t, by: t.mul_(by),
    "data": lambda t, by: t.data.mul_(by),
    "copy_": lambda t, by: t.copy_(t.clone() * by),
    "a view": lambda t, by: t.view(-1).mul_(by),
    "an element": lambda t, by: t.view(-1).__setitem__(0, t.view(-1)[0] * by),
    "out": lambda t, by: torch.mul(t.clone(), by, out=t),
    "set data": lambda t, by: setattr(t, "data", t.clone() * by),
}


@pytest.mark.parametrize("how", SCALED)
@pytest.mark.parametrize(("scheme", "name"), HELD, ids=str)
def test_scales_and_zero_points_that_are_written_are_used(scheme: pyquant.QScheme, name: str, how: str) -> None:
    if scheme.weights.two_level and how == "an element":
        pytest.skip("the scales of a row are whole steps of one")
    layer, x = calibrated(scheme), torch.randn(5, 64)
    twin, before = copy.deepcopy(layer), layer(x)
    shown, wanted = getattr(layer, name), getattr(layer, name).clone()
    assert (type(shown), type(wanted)) == (Shown, Tensor)
    by = 2 if name.endswith("scale") else 0
    SCALED[how](wanted, by)
    SCALED[how](shown, by)
    setattr(twin, name, wanted)
    assert torch.equal(getattr(layer, name), wanted)
    assert how == "set data" or torch.equal(shown, wanted)
    assert torch.equal(layer.state_dict()[name], wanted)
    assert torch.equal(layer(x), twin(x))
    assert name == "input_zero_point" or not torch.equal(layer(x), before)
    assert torch.equal(layer.weight.dequantize(), twin.weight.dequantize())


@pytest.mark.parametrize("wrong", [0.0, -1.0, torch.nan, torch.inf])
@pytest.mark.parametrize(("scheme", "name"), [case for case in HELD if case[1].endswith("scale")], ids=str)
def test_what_a_layer_may_not_hold_is_refused_and_nothing_changes(
    scheme: pyquant.QScheme, name: str, wrong: float
) -> None:
    layer, x = calibrated(scheme), torch.randn(5, 64)
    before, shown = layer(x), getattr(layer, name)
    numbers = shown.clone()
    for write in (lambda: shown.fill_(wrong), lambda: shown.view(-1).data[-1:].fill_(wrong)):
        with pytest.raises(pyquant.PyquantError, match=name):
            write()
        assert torch.equal(shown, numbers)
        assert torch.equal(getattr(layer, name), numbers)
        assert torch.equal(layer(x), before)


@pytest.mark.parametrize("name", AFFINE)
def test_zero_points_stay_codes(name: str) -> None:
    layer, x = calibrated(AFFINE[name]), torch.randn(5, 64)
    before = layer(x)
    with pytest.raises(pyquant.ArgumentError, match=f"{name}.*allowed: -"):
        getattr(layer, name).add_(300)
    assert torch.equal(layer(x), before)


def test_the_memory_of_scales_stays_for_captured_graphs() -> None:
    layer = calibrated(pyquant.W4A8(16))
    memory = layer.weight_scale_.data_ptr(), layer.storage.data_ptr()
    layer.weight_scale.mul_(2)
    assert (layer.weight_scale_.data_ptr(), layer.storage.data_ptr()) == memory


def test_layers_that_share_a_scale_do_not_change_each_other() -> None:
    """The codes that come are still those of the former scale, and the layer that takes them says so."""
    taker, x = calibrated(pyquant.W8A8()), torch.randn(5, 64)
    giver = QLinear.from_float(nn.Linear(64, 64), pyquant.W8A8Dynamic())
    giver = giver.with_outputs(taker.scheme.inputs, taker.input_scale)
    assert giver.output_scale_.data_ptr() == taker.input_scale_.data_ptr()  # which a device need not compare
    codes = giver(x)
    taker(codes)
    taker.input_scale.mul_(2)
    assert torch.equal(giver(x).scale, codes.scale)
    with pytest.raises(pyquant.ArgumentError, match="codes of this layer's input"):
        taker(giver(x))
    giver.output_scale.mul_(2)
    assert torch.equal(giver(x).data, giver(x).data)
    taker(giver(x))


def test_members_of_a_merged_group_and_convolutions_take_scales() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(64, 24, bias=False), nn.Linear(64, 24, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.q(x), self.k(x)

    x = torch.randn(5, 64)
    model = pyquant.quantize_(Two().eval(), "W8A8Dynamic", check_speed=False)
    pyquant.merge_(model, x)
    assert isinstance(model.k, MergedLinear)
    q, k = model(x)
    model.k.weight_scale.mul_(2)
    assert torch.equal(model(x)[0], q)
    assert torch.equal(model(x)[1], k * 2)
    conv = QConv2d.from_float(nn.Conv2d(4, 8, 3, bias=False), pyquant.W8A8Dynamic())
    image = torch.randn(1, 4, 5, 5)
    before = conv(image)
    conv.weight_scale.mul_(2)
    assert torch.equal(conv(image), before * 2)


class Scales(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.layer.weight_scale


def test_graphs_record_a_shown_scale() -> None:
    model, x = Scales(layer_of()), torch.randn(3, 32)
    wanted = model(x)
    assert type(wanted) is Tensor
    exported = torch.export.export(model, (x,)).module()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for made in (torch.fx.symbolic_trace(model), torch.jit.trace(model, (x,)), exported, compiled):
        assert torch.equal(made(x), wanted)


def test_a_base_is_a_plain_tensor_and_compiled_code_takes_what_is_shown() -> None:
    layer, x = layer_of(), torch.randn(3, 24)
    base = layer.bias._base
    assert type(base) is Tensor
    assert base._base is None
    compiled = torch.compile(lambda a, b: a + b, backend="eager")
    assert torch.equal(compiled(x, layer.bias), x + layer.bias)
