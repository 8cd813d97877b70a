"""Who else holds a tensor, or a layer: captured graphs, autograd, other threads, callers, pickles."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant import QLinear, gptq_, insert_fake_quantize_, learn_rounding_, quantize_
from pyquant.core.presets import FP16, W4A4, W4A8, W4A16, W8A8, W8A16, W4A8Dynamic, W8A8Dynamic
from pyquant.io.pretrained.save import state_without_codes
from pyquant.nn import foreign_saves
from pyquant.nn.merged_linear import MergedLinear
from pyquant.nn.two_forms import TwoFormLinear
from pyquant.ops import float_linear, weight_only_linear
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.float_model import float_parameters
from pyquant.simulate.layer import SimulatedLayer

SCHEMES = [W8A8Dynamic(), W8A8(), W4A8(), W4A8Dynamic(), W4A4(symmetric_inputs=False), W8A16(), W4A16(), FP16()]


def made(scheme: Any, seed: int) -> QLinear:
    torch.manual_seed(seed)
    static = scheme.inputs is not None and not scheme.inputs.dynamic
    ranges: dict[str, Any] = {"input_scale": 0.05 + 0.01 * seed} if static else {}
    if static and not scheme.inputs.symmetric:
        ranges["input_zero_point"] = seed
    return QLinear.from_float(nn.Linear(256, 24), scheme, **ranges)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("in_both_forms", [False, True])
def test_a_loaded_state_comes_into_the_same_memory(scheme: Any, in_both_forms: bool) -> None:
    """A captured CUDA graph reads every tensor of the layer where it was."""
    layer, other, x = made(scheme, 0), made(scheme, 1), torch.randn(5, 256)
    if in_both_forms:
        if scheme.is_float:
            pytest.skip("has no codes")
        layer = TwoFormLinear.of(layer, [(3, float("inf"))])
        other = TwoFormLinear.of(other, [(3, float("inf"))])
    before = {name: t.data_ptr() for name, t in layer._buffers.items() if t is not None}
    layer.load_state_dict(other.state_dict())
    assert {name: t.data_ptr() for name, t in layer._buffers.items() if t is not None} == before
    assert torch.equal(layer(x), other(x))
    assert torch.equal(layer(x[:2]), other(x[:2]))


@pytest.mark.parametrize("name", ["w_scale", "bias"])
def test_numbers_of_a_backward_pass_are_watched(name: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    numbers = {"w_scale": torch.ones(4), "bias": torch.zeros(4)}
    w = torch.randint(-9, 9, (4, 8), dtype=torch.int8)
    fused = ("relu", 0.0, 0.0)
    y = weight_only_linear(x, w, numbers["w_scale"], None, numbers["bias"], None, 8, 0, *fused)
    numbers[name].mul_(100)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("m", "k", "n"), [(3, 0, 4), (3, 8, 0), (0, 8, 4), (0, 0, 0)])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_backward_passes_of_nothing(m: int, k: int, n: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, m, k, requires_grad=True)
    w = torch.randn(n, k, requires_grad=True)
    float_linear(x, w).sum().backward()
    want = torch.randn(0).sum(), nn.functional.linear(x.detach(), w.detach())
    assert x.grad is not None
    assert w.grad is not None
    assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)
    assert want[1].shape == (*shape, m, n)
    y = torch.randn(*shape, m, k, requires_grad=True)
    weight_only_linear(y, torch.zeros(n, k, dtype=torch.int8), torch.ones(n), None, None, None, 8, 0).sum().backward()
    assert y.grad is not None
    assert not y.grad.any()


class Normalises(nn.Module):
    """Writes into its input, as many models of images do."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.in_place = nn.Linear(16, 32), nn.Linear(32, 8), in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.sub_(1.0).div_(2.0) if self.in_place else (x - 1.0) / 2.0
        y: Tensor = self.last(self.first(x).relu())
        return y


def test_batches_survive_a_model_that_writes_into_them() -> None:
    data = [torch.randn(12, 16) + 1 for _ in range(8)]
    kept = copy.deepcopy(data)
    models = [insert_fake_quantize_(Normalises(in_place), W4A8()) for in_place in (True, False)]
    for model in models:
        calibrate_(model, data, num_batches=8)
        gptq_(model, data, 8)
    assert all(torch.equal(a, b) for a, b in zip(data, kept, strict=True))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_improvers_in_inference_mode() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        data = [torch.randn(12, 16) for _ in range(8)]
        model = insert_fake_quantize_(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), W4A8())
        calibrate_(model, data, num_batches=8)
    model = insert_fake_quantize_(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), W4A8())
    calibrate_(model, [b.clone() for b in data], num_batches=8)
    with torch.inference_mode():
        found = learn_rounding_(model, data, 8, steps=40)
    assert any(layer.moved > 0 for layer in found.values())
    assert not any(p.is_inference() for p in model.parameters())
    with torch.inference_mode():
        layer = quantize_(nn.Sequential(nn.Linear(8, 8)), "W8A16")
    x = torch.randn(2, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.any()


def test_a_pickle_knows_the_float_model_still() -> None:
    torch.manual_seed(0)
    data = [torch.randn(12, 16) for _ in range(8)]
    model = insert_fake_quantize_(nn.Sequential(nn.Linear(16, 8)), W4A8())
    first = model[0].weight.detach().clone()
    calibrate_(model, data, num_batches=8)
    gptq_(model, data, 8)
    assert not torch.equal(model[0].weight, first)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        layer = loaded[0]
        assert isinstance(layer, SimulatedLayer)
        assert torch.equal(float_parameters(layer)[0], first)
        with torch.no_grad():
            layer.weight.mul_(2)  # trained since: the layer's own are the float model again
        assert float_parameters(layer)[0] is layer.weight
        again = pickle.loads(pickle.dumps(loaded))[0]
        assert float_parameters(again)[0] is again.weight


def test_a_state_in_another_thread_meanwhile() -> None:
    model = quantize_(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), "W8A8Dynamic")
    whole = set(model.state_dict())
    found: list[set[str]] = []
    with foreign_saves.without_codes():
        thread = threading.Thread(target=lambda: found.append(set(model.state_dict())))
        thread.start()
        thread.join()
        assert set(model.state_dict()) == {"1.weight", "1.bias"}
    assert found == [whole]
    assert set(state_without_codes(model)) == {"1.weight", "1.bias"}
    assert set(model.state_dict()) == whole


class _Taken(list):  # type: ignore[type-arg]
    """Parts that another thread takes as soon as they have been looked at."""

    def __getitem__(self, place: Any) -> Any:
        part = super().__getitem__(place)
        if isinstance(place, int):
            self[place] = None
        return part


def test_a_part_that_another_thread_takes_meanwhile() -> None:
    feed = nn.ModuleDict({"gate_proj": nn.Linear(16, 24), "up_proj": nn.Linear(16, 24)})
    pyquant.merge_(quantize_(feed, "W8A8Dynamic"))
    up, x = feed["up_proj"], torch.randn(3, 16)
    assert isinstance(up, MergedLinear)
    with torch.no_grad():
        feed["gate_proj"](x)
        seen = up._group._seen
        assert seen is not None
        seen.parts = _Taken(seen.parts)
        assert isinstance(up(x), Tensor)


def test_forward_mode_is_refused_and_not_lost() -> None:
    from torch.autograd import forward_ad

    x = torch.randn(4)
    with forward_ad.dual_level(), pytest.raises(pyquant.UnsupportedError, match="forward-mode"):
        pyquant.ops.fake_quantize(forward_ad.make_dual(x, torch.ones(4)), torch.tensor(0.1))
    with forward_ad.dual_level():
        assert pyquant.ops.fake_quantize(x, torch.tensor(0.1))[0].shape == (4,)


def test_timing_changes_neither_the_model_nor_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4)).train()
    quantize_(model, "W8A8Dynamic")
    statistics = {name: t.clone() for name, t in model[1].named_buffers()}
    torch.manual_seed(3)
    wanted = torch.randn(4)
    torch.manual_seed(3)
    pyquant.compare_speed(model, torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), seconds=0.01)
    pyquant.auto_(model, torch.ones(8, 16), seconds=0.01)
    assert torch.equal(torch.randn(4), wanted)
    assert all(torch.equal(t, statistics[name]) for name, t in model[1].named_buffers())
    assert all(module.training for module in model.modules())


def test_a_class_is_gone_with_its_model() -> None:
    """Notebooks and searches make classes anew, whose methods hold what stood around them."""

    def one(kind: int) -> weakref.ref[type]:
        class Feed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 64)

            def forward(self, x: Tensor) -> Tensor:
                return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

        model = nn.Sequential(Feed(), nn.ReLU()).eval()
        x = torch.randn(4, 64)
        pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
        pyquant.fuse_(model)
        pyquant.merge_(model, x)
        pyquant.quantization_report(model)
        if kind == 1:
            pyquant.dequantize_(model)
        model(x)
        return weakref.ref(Feed)

    made = [one(kind) for kind in (0, 1, 0)]
    gc.collect()
    assert [reference() for reference in made] == [None] * 3
