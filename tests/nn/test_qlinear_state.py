"""What a QLinear holds: state_dict, casts, moves, assignment; and that codes are held once."""

from __future__ import annotations

import copy
import gc
import io

import accept
import pytest
import torch
from qlayers import ALL, CODES_OUT, INTEGER, calibration, layer
from torch import nn

import pyquant
from pyquant.core.presets import FP16, W4A8, W4A16, W8A8, W4A8Dynamic, W8A8Dynamic
from pyquant.nn.qlinear import QLinear

SMALL = "small layers may be constant or mostly zero"


def same_state(a: nn.Module, b: nn.Module) -> None:
    one, two = a.state_dict(), b.state_dict()
    assert list(one) == list(two)
    for name in one:
        assert one[name].dtype == two[name].dtype, name
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("scheme", ALL + CODES_OUT, ids=str)
def test_state_dict_round_trip(scheme: pyquant.QScheme) -> None:
    q = layer(scheme, 48, 24, activation="silu")
    again = QLinear(48, 24, scheme=scheme, activation="silu")
    assert str(again.load_state_dict(q.state_dict())) == "<All keys matched successfully>"
    same_state(q, again)
    x = torch.randn(4, 48)
    got, want = again(x), q(x)
    assert type(got) is type(want)
    assert torch.equal(got[0], want[0])


def test_state_names_and_types() -> None:
    state = layer(W4A16(16), 31 + 1, 24).state_dict()
    assert {n: (t.dtype, tuple(t.shape)) for n, t in state.items()} == {
        "weight_packed": (torch.uint8, (24, 16)),
        "weight_scale": (torch.float32, (24, 2)),
        "bias": (torch.float32, (24,)),
    }
    state = layer(W8A8(symmetric_inputs=False), 31, 5, bias=False).state_dict()
    assert {n: (t.dtype, tuple(t.shape)) for n, t in state.items()} == {
        "weight": (torch.int8, (5, 31)),
        "weight_scale": (torch.float32, (5,)),
        "input_scale": (torch.float32, (1,)),
        "input_zero_point": (torch.int32, (1,)),
    }
    assert layer(FP16("bfloat16"), 8, 4).state_dict()["weight"].dtype == torch.bfloat16
    assert layer(W4A8(None), 31, 5).state_dict()["weight_packed"].shape == (5, 16)


def test_codes_are_held_once() -> None:
    """Half a byte a weight and little else: no second copy in another layout."""
    k, n = 1024, 512
    for scheme, bits in ((W8A8Dynamic(), 8), (W4A8Dynamic(128), 4), (W4A16(128), 4)):
        q = layer(scheme, k, n)
        held = sum(t.numel() * t.element_size() for t in q.buffers())
        tensors = [o for o in gc.get_referents(*gc.get_referents(q), q) if isinstance(o, torch.Tensor)]
        assert {id(t) for t in tensors} <= {id(t) for t in q.buffers()}
        numbers = 24 * n + 12 * q.weight_scale.numel()  # scales and sums in the buffer, scales beside it
        assert held <= k * n * bits // 8 * 1.02 + numbers, (str(scheme), held)


@pytest.mark.parametrize(
    "scheme", [W8A8Dynamic(), W4A8Dynamic(16), W8A8(symmetric_inputs=False), W4A16(16), FP16()], ids=str
)
@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_casts_change_no_number(scheme: pyquant.QScheme, cast: str) -> None:
    q = layer(scheme)
    before, x = copy.deepcopy(q), torch.randn(3, 32)
    getattr(nn.Sequential(q), cast)()
    same_state(before, q)
    assert torch.equal(q(x), before(x))
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float32}[cast]
    assert q.dtype == dtype
    if cast != "double":
        assert q(x.to(dtype)).dtype == dtype
        assert q.to_float().weight.dtype == dtype


def test_a_bias_keeps_float32_from_a_half_model() -> None:
    """Held and saved in float32; shown as a half layer shows it, and what is shown and put back loses no digit."""
    q, x = layer(W8A8Dynamic(), dtype=torch.float16), torch.randn(3, 32)
    assert q.dtype == torch.float16
    q.bias = exact = torch.linspace(-1, 1, 24)
    assert q.bias.dtype == torch.float16
    assert torch.equal(q.bias, exact.half())
    assert not torch.equal(q.bias.float(), exact)
    y = q(x)
    for _ in range(2):
        assert torch.equal(q.state_dict()["bias"], exact)
        assert q.weight_scale.dtype == torch.float32
        assert torch.equal(q(x), y)
        q.bias = q.bias
        assert not torch.equal(torch.func.functional_call(q, {"bias": torch.zeros(24).half()}, (x,)), y)
    q.bias = torch.full((24,), 0.5, dtype=torch.float16)
    assert torch.equal(q.state_dict()["bias"], torch.full((24,), 0.5))
    accept.t1(q(x), q.reference(x))
    with pytest.raises(pyquant.ArgumentError, match="bias"):
        q.bias = torch.zeros(24, dtype=torch.bfloat16)


@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W4A8(16), W4A16(16), FP16()], ids=str)
def test_moves_to_and_from_meta(scheme: pyquant.QScheme) -> None:
    q = layer(scheme)
    state = q.state_dict()
    meta = copy.deepcopy(q).to("meta")
    assert {t.device.type for t in meta.state_dict().values()} == {"meta"}
    assert [t.shape for t in meta.state_dict().values()] == [t.shape for t in state.values()]
    assert not meta.kernel_info().is_exact
    with pytest.raises(RuntimeError, match=r"meta device; use load_state_dict"):
        meta.load_state_dict(state)
    meta.load_state_dict(state, assign=True)
    same_state(meta, q)
    x = torch.randn(3, 32)
    assert torch.equal(meta(x), q(x))
    direct = QLinear(32, 24, scheme=scheme, device="meta")
    direct.to_empty(device="cpu")
    direct.load_state_dict(state)
    assert torch.equal(direct(x), q(x))


def test_assignment_reaches_the_kernel() -> None:
    q, x = layer(W8A8Dynamic()), torch.randn(3, 32)
    q.bias = torch.arange(24.0)
    accept.t1(q(x), q.reference(x))
    q.weight_scale = q.weight_scale * 2
    accept.t1(q(x), q.reference(x))
    static = layer(W8A8())
    static.input_scale = torch.tensor([0.5])
    accept.t1(static(x), static.reference(x))
    for name, value, match in (
        ("bias", torch.zeros(3), r"float32 \[3\].*float32 \[24\]"),
        ("bias", torch.zeros(24).half(), "float16"),
        ("weight_scale", torch.zeros(24), "a value of 0.0.*above 0"),
        ("weight_scale", torch.full((24,), float("nan")), "a value of nan"),
        ("weight_zero_point", torch.zeros(24, dtype=torch.int32), "None with scheme W8A8Dynamic"),
        ("bias", "x", "str 'x'"),
        ("bias", torch.zeros(24, device="meta"), "device meta"),
    ):
        before = q(x)
        with pytest.raises(pyquant.ArgumentError, match=match):
            setattr(q, name, value)
        accept.t1(q(x), before)


def test_loading_refuses_what_does_not_fit_and_changes_nothing() -> None:
    q, x = layer(W8A8(symmetric_inputs=False)), torch.randn(3, 32)
    before, good = q(x), q.state_dict()
    cases = {
        "weight": (good["weight"][:, :-1], "int8 .24, 31.*int8 .24, 32"),
        "weight_scale": (torch.zeros(24), "weight_scale.*0.0"),
        "bias": (good["bias"].double(), "float64"),
        "input_scale": (torch.tensor([float("inf")]), "input_scale.*inf"),
        "input_zero_point": (torch.tensor([300], dtype=torch.int32), "300.*-128 to 127"),
    }
    for name, (value, match) in cases.items():
        with pytest.raises(RuntimeError, match=match):
            q.load_state_dict({**good, name: value})
        accept.t1(q(x), before)
    codes = good["weight"].clone()
    codes[0, 0] = -128
    with pytest.raises(RuntimeError, match=r"-128.*-127 to 127"):
        q.load_state_dict({**good, "weight": codes})
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        q.load_state_dict({k: v for k, v in good.items() if k != "bias"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*weight_packed"):
        q.load_state_dict({**good, "weight_packed": codes})
    result = q.load_state_dict({"bias": torch.zeros(24)}, strict=False)
    assert "weight" in result.missing_keys
    assert not bool(q.bias.any())  # type: ignore[union-attr]
    accept.t1(q(x), q.reference(x))


def test_packed_codes_outside_the_narrow_range_are_refused() -> None:
    q = layer(W4A8(None))
    state = q.state_dict()
    state["weight_packed"] = torch.full_like(state["weight_packed"], 0x88)  # two codes of -8
    with pytest.raises(RuntimeError, match=r"weight_packed.*-8.*-7 to 7"):
        q.load_state_dict(state)


@pytest.mark.parametrize("scheme", [s for s in INTEGER + CODES_OUT if s.is_static], ids=str)
def test_an_uncalibrated_layer_refuses_to_run(scheme: pyquant.QScheme) -> None:
    q = QLinear(32, 24, scheme=scheme)
    with pytest.raises(pyquant.ArgumentError, match=r"argument 'input_scale': got None"):
        q(torch.zeros(2, 32))
    numbers = calibration(scheme)
    with pytest.raises(pyquant.ArgumentError, match=r"argument 'input_scale': got None"):
        QLinear.from_float(nn.Linear(32, 24), scheme, **{k: v for k, v in numbers.items() if k != "input_scale"})
    partial = dict.fromkeys(("weight_scale",), torch.ones(24)) if scheme.weights.group_size is None else {}
    q.load_state_dict(partial, strict=False)
    with pytest.raises(pyquant.ArgumentError, match=r"input_scale"):
        q(torch.zeros(2, 32))
    q.load_state_dict(layer(scheme).state_dict())
    q(torch.zeros(2, 32))


def test_a_fresh_layer_gives_its_bias() -> None:
    q = QLinear(8, 4)
    assert not bool(q(torch.randn(3, 8)).any())


def test_share_memory_and_apply_to_the_same_device_keep_the_buffer() -> None:
    q = layer(W8A8Dynamic())
    storage = q._buffers["storage"]
    q.to("cpu").cpu().float()
    assert q._buffers["storage"] is storage
    q.share_memory()
    assert q._buffers["storage"].is_shared()  # type: ignore[union-attr]


@pytest.mark.parametrize("load", ["float into codes", "codes into float", "other codes", "no scale", "table"])
def test_a_weight_of_the_other_kind_is_refused_without_strict_too(load: str) -> None:
    """load_state_dict(strict=False) left the old codes, copied codes as float weights, or read them by old scales."""
    whole = copy.deepcopy(layer(W8A8Dynamic()).state_dict())
    table = pyquant.QEmbedding.from_float(nn.Embedding(10, 4))
    model, state, named = {
        "float into codes": (layer(W4A8Dynamic(None)), nn.Linear(32, 24).state_dict(), r"weight: float32.*_packed"),
        "codes into float": (nn.Linear(32, 24), whole, r'"weight".*integer codes of a quantised layer.*quantize_'),
        "other codes": (layer(W4A8Dynamic(None)), whole, r"weight: int8 .24, 32.*weight_packed uint8"),
        "no scale": (layer(W8A8Dynamic()), {"weight": whole["weight"]}, "codes without their weight_scale"),
        "table": (nn.Embedding(10, 4), table.state_dict(), "integer codes"),
    }[load]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=named):
        model.load_state_dict(state, strict=False)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before if "weight" in name)


def test_codes_of_a_state_are_plain_tensors_in_files_and_arithmetic() -> None:
    codes = layer(W8A8Dynamic()).state_dict()["weight"]
    file = io.BytesIO()
    torch.save({"weight": codes}, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)["weight"]
    assert [type(t) for t in (loaded, codes.detach(), codes + 1, codes.float(), codes[0])] == [torch.Tensor] * 5
    accept.t0(loaded, codes)


def test_codes_are_not_read_by_the_zero_points_of_others() -> None:
    symmetric, affine = layer(W4A16(32), 64, 24), layer(W4A16(32, symmetric=False), 64, 24)
    before = {name: t.clone() for name, t in affine.state_dict().items()}
    with pytest.raises(RuntimeError, match="codes without their weight_zero_point"):
        affine.load_state_dict(symmetric.state_dict(), strict=False)
    assert all(torch.equal(t, before[name]) for name, t in affine.state_dict().items())


def test_an_input_scale_is_not_read_as_one_of_other_codes() -> None:
    """The state of 8-bit inputs has the names, types and shapes of that of 4-bit inputs."""
    x = torch.randn(16, 32)
    eight, four = (
        pyquant.quantize_(nn.Sequential(nn.Linear(32, 24)), scheme, data=[x], check_speed=False)
        for scheme in ("W4A8(group_size=None)", "W4A4(group_size=None)")
    )
    for model, other in ((eight, four), (four, eight)):
        before = model(x)
        with pytest.raises(
            RuntimeError, match=r"input_scale: of codes from -\d+ to \d+; this layer's inputs have -\d+ to \d+"
        ):
            model.load_state_dict(other.state_dict())
        assert torch.equal(model(x), before)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        model.load_state_dict(state)
        model.load_state_dict(dict(state))  # a plain dict says nothing of it
        assert torch.equal(model(x), before)
