"""Layers that a module also holds where nn.Module does not look, and calls from there (MaskFormer's heads, UperNet)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant import QLinear
from pyquant.nn import swap


class Head(nn.Module):
    """Registers its layers under names and calls them from a list, as transformers' MaskformerMLPPredictionHead."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = [nn.Linear(16, 16) for _ in range(3)]
        for i, layer in enumerate(self.layers):
            self.add_module(str(i), layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Nested(Head):
    def __init__(self) -> None:
        super().__init__()
        first, second, third = self.layers
        self.layers = {"a": (first, [second]), "b": 3}
        self.__dict__["beside"] = third

    def forward(self, x: Tensor) -> Tensor:
        first, (second,) = self.layers["a"]
        return self.__dict__["beside"](second(first(x).relu()).relu())  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.last = kind(), nn.Linear(16, 4)
        self.seen_elsewhere = [self.head._modules["1"]]  # of a module above

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(x))  # type: ignore[no-any-return]


X = torch.randn(5, 16)
KINDS = pytest.mark.parametrize("kind", [Head, Nested])


def called_of(model: nn.Module, kind: type[nn.Module]) -> set[str]:
    """The layers of a class that a call of the model calls. A float layer and its twin share their hooks: the hook's
    first argument says who was called."""
    called: set[str] = set()
    handles = [
        layer.register_forward_hook(lambda one, *_, name=name: called.add(name) if type(one) is kind else None)
        for name, layer in model.named_modules()
        if isinstance(layer, kind)
    ]
    model(X)
    for handle in handles:
        handle.remove()
    return called


ALL = {"head.0", "head.1", "head.2", "last"}


@KINDS
@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W8A8", "W4A16"])
def test_quantised_layers_are_called_and_come_back(kind: type[nn.Module], scheme: str) -> None:
    model = Model(kind).eval()
    want = model(X)
    pyquant.quantize_(
        model, scheme, data=[X] if scheme == "W8A8" else None, check_speed=False, on_indivisible="per_channel"
    )
    assert called_of(model, QLinear) == ALL
    assert model.seen_elsewhere == [model.head._modules["1"]]
    again = copy.deepcopy(model)
    assert torch.equal(again(X), model(X))
    pyquant.dequantize_(model)
    assert called_of(model, nn.Linear) == ALL
    torch.testing.assert_close(model(X), want, atol=0.3, rtol=0.3)


@KINDS
def test_training_sees_them(kind: type[nn.Module]) -> None:
    model = Model(kind)
    pyquant.prepare_qat_(model, pyquant.W8A8Dynamic())
    model(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    pyquant.convert_(model.eval())
    assert called_of(model, QLinear) == ALL


@KINDS
def test_a_saved_model_is_read(kind: type[nn.Module], tmp_path: Any) -> None:
    model = pyquant.quantize_(Model(kind).eval(), "W8A8Dynamic", check_speed=False)
    pyquant.save_pretrained(model, tmp_path)
    read = pyquant.load_pretrained(tmp_path, lambda: Model(kind).eval())
    assert torch.equal(read(X), model(X))
    assert called_of(read, QLinear) == ALL


@KINDS
def test_a_failure_leaves_what_was_there(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(kind).eval()
    layers = [model.head._modules[str(i)] for i in range(3)]
    want = model(X)

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(swap, "tell_parents", fails)
    with pytest.raises(KeyboardInterrupt):
        pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    assert [model.head._modules[str(i)] for i in range(3)] == layers
    assert called_of(model, nn.Linear) == ALL
    assert torch.equal(model(X), want)


def test_steps_of_as_it_is_restore_lists() -> None:
    model = Model(Head)
    before, steps = list(model.head.layers), swap.as_it_is(model)
    pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    for step in reversed(steps):
        step()
    assert model.head.layers == before


def test_a_tuple_of_somebody_is_left(recwarn: pytest.WarningsRecorder) -> None:
    """Nobody knows how such a one is made; what runs tells that the layer was not called."""

    class Pair(tuple):
        pass

    model = Model(Head).eval()
    model.head.layers = Pair(model.head.layers)
    pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    assert called_of(model, QLinear) == {"last"}


def test_a_folded_norm_goes_from_the_list_too() -> None:
    """Called once more from there it would be applied twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
            self.steps = list(self.inner)

        def forward(self, x: Tensor) -> Tensor:
            for step in self.steps:
                x = step(x)
            return x

    torch.manual_seed(0)
    block = Block()
    block(torch.randn(64, 16) * 3 + 1)
    want = block.eval()(X)
    pyquant.fold_batch_norm_(block)
    assert type(block.steps[1]) is nn.Identity
    torch.testing.assert_close(block(X), want)
