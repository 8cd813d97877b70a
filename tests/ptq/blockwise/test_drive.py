"""Improvers block by block: the numbers of the whole-model way, at a cost that is linear in the depth."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_nets import WIDTH, Between, Block, Cross, Decoder, Images, Skips, forwards, sequences
from sample import sampled
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyquant import W4A8, W4A16, ArgumentError, W4A4Dynamic, bias_correction_, gptq_
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.insert import insert_fake_quantize_

IMAGES = list(torch.randn(4, 2, 3, 13, 13, generator=torch.Generator().manual_seed(0)))
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, list[Tensor]]] = {
    "decoder": (partial(Decoder, 4), W4A16(group_size=8), sequences(4)),
    "decoder without ends": (partial(Decoder, 3, ends=False), W4A8(group_size=None), sequences(4, width=WIDTH)),
    "dynamic": (partial(Decoder, 3), W4A4Dynamic(), sequences(4)),
    "skips": (partial(Skips, 4), W4A16(group_size=None), sequences(4)),
    "encoder and decoder": (partial(Cross, 2), W4A16(group_size=None), sequences(4)),
    "images": (Images, W4A16(group_size=None), IMAGES),
}
STAGES = {"decoder": 6, "decoder without ends": 3, "dynamic": 5, "skips": 6, "encoder and decoder": 5, "images": 7}
IMPROVERS: dict[str, Callable[..., dict[str, Any]]] = {
    "gptq": partial(gptq_, act_order=False, correct_targets=False),
    "act_order": partial(gptq_, act_order=True, correct_targets=False),
    "bias": bias_correction_,
}
PAIRS = [f"{improver} of {what}" for improver in IMPROVERS for what in MODELS]
# Every model and every improver in each run.
ALWAYS = [
    "gptq of decoder",
    "gptq of encoder and decoder",
    "act_order of images",
    "act_order of skips",
    "bias of decoder without ends",
    "bias of dynamic",
]


def simulating(what: str) -> tuple[nn.Module, list[Tensor]]:
    make, scheme, data = MODELS[what]
    torch.manual_seed(0)
    return calibrate_(insert_fake_quantize_(make().eval(), scheme), data, 4), data


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def changed(model: nn.Module, fresh: nn.Module) -> set[str]:
    old = fresh.state_dict()
    return {name for name, t in model.state_dict().items() if name not in old or not torch.equal(t, old[name])}


@pytest.fixture
def every_judge_accepts(monkeypatch) -> None:
    """Inside of blocks another error judges than the model's; without it the ways are the same."""
    monkeypatch.setattr("pyquant.ptq.improve.gptq.relative_mse", lambda floats, output: 0.0)
    monkeypatch.setattr("pyquant.ptq.improve.gptq.error_function", lambda error: lambda floats, output: 0.0)


@pytest.mark.usefixtures("every_judge_accepts")
@pytest.mark.parametrize("pair", sampled(PAIRS, 1, "improvers of models", always=ALWAYS))
def test_equal_to_the_bit_to_the_whole_model_way(pair, tmp_path) -> None:
    improver, _, what = pair.partition(" of ")
    whole, data = simulating(what)
    by_blocks, seen = copy.deepcopy(whole), []
    want = IMPROVERS[improver](whole, data, 4, blocks=None)
    cache = tmp_path if improver == "gptq" else None
    found = IMPROVERS[improver](by_blocks, data, 4, progress=lambda *step: seen.append(step), cache=cache)
    assert list(found) == list(want)
    assert [(done, total) for done, total, _ in seen] == [(i + 1, STAGES[what]) for i in range(STAGES[what])]
    assert differing(whole, by_blocks) == []
    assert changed(whole, simulating(what)[0]) >= {
        f"{name}.{'bias' if improver == 'bias' else 'weight'}" for name in found
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("every_judge_accepts")
def test_corrected_targets_are_those_of_the_whole_model_way() -> None:
    """Where no layer stands outside of the blocks: those have no corrected targets in a model with blocks."""
    whole, data = simulating("decoder without ends")
    by_blocks, plain = copy.deepcopy(whole), copy.deepcopy(whole)
    for model, options in ((whole, {"blocks": None}), (by_blocks, {}), (plain, {})):
        gptq_(model, data, 4, act_order=False, correct_targets=model is not plain, **options)
    assert differing(whole, by_blocks) == []
    assert len(differing(whole, plain)) > 6


def test_a_wrong_input_of_a_block_would_be_seen(monkeypatch) -> None:
    """Fed by the float model, blocks would get other codes: the comparison above sees it."""
    from pyquant.ptq.blockwise import drive

    whole, data = simulating("decoder")
    by_blocks = copy.deepcopy(whole)
    ordinary = drive._Inputs._tensor

    def from_the_float_model(self, batch: int, ref: Any) -> Tensor:
        self._which = "float"
        return ordinary(self, batch, ref)

    bias_correction_(whole, data, 4, blocks=None)
    monkeypatch.setattr(drive._Inputs, "_tensor", from_the_float_model)
    bias_correction_(by_blocks, data, 4)
    assert differing(whole, by_blocks)


@pytest.mark.parametrize("deep", [24, pytest.param(64, marks=pytest.mark.nightly)])
def test_the_cost_is_linear_in_the_depth(deep: int) -> None:
    """In blocks that ran, with layers in front of the blocks and behind them, and everything tried for each layer."""

    def cost(depth: int, **options: Any) -> int:
        torch.manual_seed(0)
        model = insert_fake_quantize_(Decoder(depth, 4).eval(), W4A16(group_size=None))
        gptq_(model, sequences(2, rows=1), 2, **options)
        return forwards(model)

    assert cost(deep) <= 1.1 * deep / 8 * cost(8)
    assert cost(8, blocks=None) > 3 * cost(4, blocks=None)  # so that the count can fail


class Live(TorchDispatchMode):
    """The largest sum of bytes of all tensors that were made inside and lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return found

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@pytest.mark.usefixtures("every_judge_accepts")
def test_peak_memory_is_one_block_and_its_inputs(tmp_path) -> None:
    width = 32

    def peak(depth: int, **options: Any) -> int:
        torch.manual_seed(0)
        data = sequences(2, rows=2, width=width)
        gc.collect()
        with Live() as live:
            model = insert_fake_quantize_(Decoder(depth, width, ends=False).eval(), W4A16(group_size=None))
            gptq_(model, data, 2, act_order=True, **options)
        return live.peak

    parameters = 4 * sum(p.numel() for p in Block(width).parameters())
    deep, shallow = peak(4, save_to=tmp_path / "4"), peak(2, save_to=tmp_path / "2")
    assert deep - shallow <= 2 * 1.15 * parameters  # and scales, which are fixed from here on
    # ten float64 matrices of the widest layer's inputs (moments, their factors), and a block besides the model
    assert shallow <= 4 * parameters + 10 * 8 * (2 * width) ** 2
    assert peak(4) - peak(2) > 2 * 1.5 * parameters  # all is kept to undo it: the measure can fail


def test_on_an_error_everything_is_as_before(monkeypatch) -> None:
    model, data = simulating("decoder")
    before, seen = {name: t.clone() for name, t in model.state_dict().items()}, []

    def stop(done: int, total: int, what: str) -> None:
        seen.append(what)
        if done == 4:
            raise KeyboardInterrupt

    for improve in (gptq_, bias_correction_):
        with pytest.raises(KeyboardInterrupt):
            improve(model.train(), data, 4, progress=stop)
        assert seen == ["layers 0", "layers.0", "layers.1", "layers.2"]
        seen.clear()
        assert before.keys() == model.state_dict().keys()
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        assert model.training
        assert model.layers[2].mix.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Overwrites(Block):
    """Changes what it is given."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, place: tuple[Tensor, float]) -> tuple[Tensor, None]:
        return super().forward(x.add_(1), mask, place=place)


class Noting(Block):
    """Is given an object of its own, as blocks that keep keys and values are."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, place: Any) -> tuple[Tensor, None]:
        return super().forward(x, mask, place=(place[0], 1.0))


class Passes(Decoder):
    """A decoder of other blocks."""

    def __init__(self, kind: type[Block], place: Any) -> None:
        super().__init__(0)
        self.layers, self.place = nn.ModuleList([kind(), kind()]), place

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x, place=self.place)[0]
        return self.head(x)


class Backwards(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in reversed(self.layers):
            x = layer(x, place=(torch.zeros(1), 1.0))[0]
        return self.head(x)


class Tied(Decoder):
    """A layer that stands in two blocks."""

    def __init__(self) -> None:
        super().__init__(2)
        self.layers[1].mix = self.layers[0].mix


NO_CHAINS = {
    "computed from what block": lambda: Between(3),
    "changes what it is given": lambda: Passes(Overwrites, (torch.zeros(1), 1.0)),
    "is given a SimpleNamespace": lambda: Passes(Noting, (torch.zeros(1), SimpleNamespace())),
    "block 1 is called when block 0": lambda: Backwards(2),
    "stands in blocks": Tied,
}


@pytest.mark.parametrize("why", NO_CHAINS)
def test_what_is_no_chain_takes_the_whole_model_or_is_refused(why) -> None:
    torch.manual_seed(0)
    model = insert_fake_quantize_(NO_CHAINS[why]().eval(), W4A16(group_size=None))
    before, whole = {name: t.clone() for name, t in model.state_dict().items()}, copy.deepcopy(model)
    with pytest.raises(ArgumentError, match=f"'blocks'.*{why}"):
        bias_correction_(model, sequences(4), 4, blocks="layers")
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    with pytest.raises(ArgumentError, match=f"'device'.*{why}"):
        bias_correction_(model, sequences(4), 4, device="cpu")
    seen: list[tuple[int, int, str]] = []
    found = bias_correction_(model, sequences(4), 4, progress=lambda *step: seen.append(step))
    assert seen == [(1, 1, "layers 0")]
    assert found == bias_correction_(whole, sequences(4), 4, blocks=None)
    assert differing(whole, model) == []


def test_blocks_by_name() -> None:
    want, data = simulating("decoder")
    first, third = copy.deepcopy(want), copy.deepcopy(want)
    seen: list[str] = []
    expected = bias_correction_(want, data, 4, blocks=None)
    assert bias_correction_(first, data, 4, blocks="layers") == expected
    names = ["layers.1", "layers.2"]  # the first and the last one are layers outside then
    found = bias_correction_(third, data, 4, blocks=names, progress=lambda _, __, what: seen.append(what))
    assert found == expected
    assert seen == ["layers 0", *names, "layers 1"]
    assert differing(want, first) == differing(want, third) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": "layer"}, 'did you mean "layers"'),
        ({"blocks": ["layers.0", "layers.0"]}, "each once"),
        ({"blocks": ["layers", "layers.0"]}, "holds another block"),
        ({"blocks": "layers.0"}, "which is a layer|no chain"),
        ({"blocks": 3}, "blocks"),
        ({"blocks": []}, "blocks"),
        ({"device": "nonsense"}, "device"),
        ({"progress": 1}, "progress"),
        ({"blocks": None, "cache": "somewhere"}, "'cache'.*blocks=None"),
        ({"blocks": None, "save_to": "somewhere"}, "save_to"),
        ({"save_to": 3}, "save_to"),
        ({"cache": 3}, "cache"),
    ],
)
def test_wrong_arguments_are_named(change, message, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = simulating("decoder")
    for improve in (gptq_, bias_correction_):
        with pytest.raises(ArgumentError, match=message):
            improve(model, data, 4, **change)
    assert list(tmp_path.iterdir()) == []


def test_one_block_at_a_time_is_on_the_device(monkeypatch) -> None:
    """Without another device: every move of a block is written down."""
    model, data = simulating("decoder")
    want = copy.deepcopy(model)
    bias_correction_(want, data, 4)
    moves: list[tuple[str, str]] = []
    names = {id(m): name for name, m in model.named_modules()}
    ordinary = nn.Module.to

    def to(self: nn.Module, device: Any) -> nn.Module:
        moves.append((names[id(self)], str(device)))
        return ordinary(self, "cpu")

    monkeypatch.setattr(nn.Module, "to", to)
    monkeypatch.setattr("pyquant.ptq.blockwise.offload.to_device", lambda tree, device: tree)
    monkeypatch.setattr("pyquant.ptq.blockwise.drive.to_device", lambda tree, device: tree)
    bias_correction_(model, data, 4, device="cuda:3")
    there: set[str] = set()
    for name, device in moves:
        assert name.startswith("layers.")
        (there.add if device == "cuda:3" else there.discard)(name)
        assert len(there) <= 1
    assert not there
    assert {name for name, _ in moves} == {f"layers.{i}" for i in range(4)}
    assert differing(want, model) == []
