"""save_pretrained and load_pretrained: equal bits afterwards, strict keys, and no half-loaded model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qlayers import ALL, CODES_OUT, layer
from torch import Tensor, nn

import pyquant
from pyquant.core.presets import FP16, W4A16, W8A8, W4A8Dynamic, W8A8Dynamic
from pyquant.core.qtensor import QTensor


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(20, width, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width, bias=False))
        self.shared = nn.Linear(width, width)
        self.again = self.shared
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 20, bias=False)
        self.register_buffer("offset", torch.arange(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self.embed(ids))
        return self.head(self.norm(self.again(self.shared(x))))


CONFIG = {
    "body.0": W4A8Dynamic(16),
    "body.2": W4A16(32),
    "shared": W8A8(symmetric_inputs=True),
    "head": FP16("bfloat16"),
}


def quantised(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Net().to(dtype).eval()
    config: dict[Any, Any] = {**CONFIG, nn.Embedding: W8A8Dynamic()}
    return pyquant.quantize_(model, config, embeddings=True, input_scales={"shared": 0.02})


IDS = torch.arange(20)


def same_state(a: nn.Module, b: nn.Module) -> None:
    one, two = a.state_dict(), b.state_dict()
    assert list(one) == list(two)
    for name in one:
        assert (one[name].dtype, one[name].shape) == (two[name].dtype, two[name].shape), name
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["function", "module", "quantised module"])
def test_equal_bits_after_a_round_trip(tmp_path: Path, dtype: torch.dtype, how: str) -> None:
    model = quantised(dtype)
    digest = pyquant.save_pretrained(model, tmp_path, extra={"note": "x"})
    start: Any = {"function": Net, "module": Net().to(torch.float16), "quantised module": quantised()}[how]
    again = pyquant.load_pretrained(tmp_path, start, manifest_sha256=digest)
    assert (again is start) == (how != "function")
    same_state(model, again)
    again.eval()
    assert torch.equal(model(IDS), again(IDS))
    assert again.shared is again.again
    assert again.embed.padding_idx == 0
    assert [m.dtype for m in again.modules() if isinstance(m, pyquant.QLinear)] == [dtype] * 4
    assert json.loads((tmp_path / "manifest.json").read_text())
    digest_again = pyquant.save_pretrained(again, tmp_path / "b", extra={"note": "x"})
    assert digest_again == digest


@pytest.mark.parametrize("scheme", ALL + CODES_OUT, ids=str)
def test_every_scheme_round_trips(tmp_path: Path, scheme: pyquant.QScheme) -> None:
    q = layer(scheme, 48, 24, bias=scheme.weights.bits == 8, activation="clamp", clamp=(-0.5, float("inf")))
    model = nn.ModuleDict({"q": q})
    pyquant.save_pretrained(model, tmp_path)
    again = pyquant.load_pretrained(
        tmp_path, lambda: nn.ModuleDict({"q": nn.Linear(48, 24, bias=scheme.weights.bits == 8)})
    )
    same_state(model, again)
    got, want = again["q"](torch.ones(2, 48)), q(torch.ones(2, 48))  # type: ignore[index]
    assert torch.equal(got.data, want.data) if isinstance(want, QTensor) else torch.equal(got, want)
    assert (again["q"].scheme, again["q"].activation, again["q"].clamp) == (q.scheme, q.activation, q.clamp)  # type: ignore[index]


def test_per_tensor_weights_and_empty_layers(tmp_path: Path) -> None:
    scheme = pyquant.QScheme(pyquant.TensorScheme(), W8A8Dynamic().inputs)
    build: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 0), nn.Linear(0, 3))  # noqa: E731
    model = pyquant.quantize_(build(), scheme)
    pyquant.save_pretrained(model, tmp_path)
    same_state(model, pyquant.load_pretrained(tmp_path, build))


def test_the_skeleton_may_be_on_the_meta_device(tmp_path: Path) -> None:
    class NoCache(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.cache

    model = quantised()
    pyquant.save_pretrained(model, tmp_path)
    with torch.device("meta"):
        skeleton = NoCache()
    again = pyquant.load_pretrained(tmp_path, skeleton).eval()
    same_state(model, again)
    assert torch.equal(again(IDS), model(IDS))
    with torch.device("meta"):
        skeleton = Net()
    with pytest.raises(pyquant.CheckpointError, match=r"no numbers for cache.*build the model on the CPU"):
        pyquant.load_pretrained(tmp_path, skeleton)
    assert all(t.is_meta for t in skeleton.state_dict().values())


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.ModuleDict({"a": nn.Embedding(6, 8), "b": nn.Linear(8, 6, bias=False), "c": nn.Linear(8, 8)})
        model["b"].weight = model["a"].weight
        return model

    model = pyquant.quantize_(build(), {"c": W8A8Dynamic()})
    pyquant.save_pretrained(model, tmp_path)
    again = pyquant.load_pretrained(tmp_path, build)
    assert again["a"].weight is again["b"].weight  # type: ignore[index]
    same_state(model, again)
    twice = pyquant.quantize_(nn.Sequential(*[copy.copy(nn.Linear(8, 8))] * 2), W8A8Dynamic())
    pyquant.save_pretrained(twice, tmp_path)
    loaded = pyquant.load_pretrained(tmp_path, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert loaded[0] is loaded[1]  # type: ignore[index]


def test_tied_tensors_may_hold_nan(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.l, self.h = nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8, bias=False)
            self.h.weight = self.e.weight

    model = Tied()
    with torch.no_grad():
        model.e.weight[3, 3] = torch.nan
    pyquant.save_pretrained(pyquant.quantize_(model, {"l": W8A8Dynamic()}), tmp_path)
    again = pyquant.load_pretrained(tmp_path, Tied)
    assert again.h.weight is again.e.weight  # type: ignore[union-attr]
    assert again.e.weight.isnan().nonzero().tolist() == [[3, 3]]  # type: ignore[union-attr]


def test_a_float_model_and_a_single_layer(tmp_path: Path) -> None:
    plain = nn.Linear(4, 3)
    pyquant.save_pretrained(plain, tmp_path / "a")
    same_state(plain, pyquant.load_pretrained(tmp_path / "a", nn.Linear(4, 3)))
    q = layer(W8A8Dynamic(), 8, 4)
    pyquant.save_pretrained(q, tmp_path / "b")
    again = pyquant.load_pretrained(tmp_path / "b", lambda: nn.Linear(8, 4))
    assert torch.equal(again(torch.ones(1, 8)), q(torch.ones(1, 8)))


def change(model: nn.Module, **modules: nn.Module) -> nn.Module:
    for name, module in modules.items():
        setattr(model, name, module)
    return model


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Net(48), r"layer '(embed|body.0)': saved \[(20|64), 32\], the model has \[(20|64), 48\]"),
        (
            lambda: change(Net(), extra=nn.Linear(2, 2)),
            "missing in the checkpoint extra.bias, extra.weight; unexpected nothing",
        ),
        (
            lambda: change(Net(), norm=nn.Identity()),
            "missing in the checkpoint nothing; unexpected norm.bias, norm.num_batches",
        ),
        (lambda: change(Net(), norm=nn.BatchNorm1d(31)), r"tensor 'norm.*saved \[32\], the model has \[31\]"),
        (lambda: change(Net(), head=nn.Linear(32, 20)), "layer 'head': the model has a bias, the checkpoint has none"),
        (lambda: change(Net(), head=nn.Identity()), "layer 'head' is a saved linear; the model has a Identity"),
        (lambda: change(Net(), embed=nn.Linear(32, 20)), "layer 'embed' is a saved embedding"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "has no module of that name"),
    ],
)
def test_differences_are_named_and_change_nothing(tmp_path: Path, build: Callable[[], nn.Module], match: str) -> None:
    pyquant.save_pretrained(quantised(), tmp_path)
    skeleton = build()
    before = {n: (id(t), t.clone()) for n, t in skeleton.state_dict(keep_vars=True).items()}
    modules = [id(m) for m in skeleton.modules()]
    with pytest.raises(pyquant.CheckpointError, match=match):
        pyquant.load_pretrained(tmp_path, skeleton)
    assert [id(m) for m in skeleton.modules()] == modules
    after = skeleton.state_dict(keep_vars=True)
    assert all(id(after[n]) == i and torch.equal(after[n], t) for n, (i, t) in before.items())


def test_a_bias_that_correction_gave_comes_back(tmp_path: Path) -> None:
    """A language model's layers have none of their own."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 8, bias=False))

    batches = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    model = pyquant.quantize_(build(), "W4A8", data=batches, improve=("bias_correction",))
    assert model[0].bias is not None
    pyquant.save_pretrained(model, tmp_path)
    loaded = pyquant.load_pretrained(tmp_path, build())
    assert torch.equal(loaded(batches[0]), model(batches[0]))
    assert torch.equal(loaded[0].bias, model[0].bias)


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(pyquant.ArgumentError, match=r"argument 'model'"):
        pyquant.save_pretrained({"a": 1}, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(pyquant.ArgumentError, match=r"argument 'extra'"):
        pyquant.save_pretrained(Net(), tmp_path, extra=["a"])  # type: ignore[arg-type]
    with pytest.raises(pyquant.ArgumentError, match=r"layer 'q' without input_scale"):
        pyquant.save_pretrained(nn.ModuleDict({"q": pyquant.QLinear(4, 4, scheme=W8A8())}), tmp_path)
    with pytest.raises(pyquant.ArgumentError, match=r"meta"):
        pyquant.save_pretrained(Net().to("meta"), tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(pyquant.CheckpointError, match=r"manifest"):
        pyquant.load_pretrained(tmp_path, Net)
    pyquant.save_pretrained(quantised(), tmp_path)
    with pytest.raises(pyquant.ArgumentError, match=r"argument 'model'.*NoneType"):
        pyquant.load_pretrained(tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(pyquant.ArgumentError, match=r"returns int"):
        pyquant.load_pretrained(tmp_path, lambda: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(pyquant.CheckpointError, match=r"(?i)sha-?256|digest|pin"):
        pyquant.load_pretrained(tmp_path, Net, manifest_sha256="0" * 64)


def test_a_simulating_model_is_to_be_converted_first(tmp_path: Path) -> None:
    """Its file would hold floats, or ranges that no float layer takes."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    for model, names in (
        (pyquant.prepare_qat_(build(), W8A8Dynamic()), "2 layers: '0', '2'"),
        (pyquant.insert_fake_quantize_(build(), {"0": W4A8Dynamic(16), "2": None}), "1 layer: '0'"),
    ):
        with pytest.raises(pyquant.ArgumentError, match=rf"simulates its quantised layers \({names}\).*convert_"):
            pyquant.save_pretrained(model, tmp_path / "it")
        assert not (tmp_path / "it").exists()
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # which resumes training
        pyquant.save_pretrained(pyquant.convert_(model), tmp_path / "it")
        same_state(pyquant.load_pretrained(tmp_path / "it", build), model)
        (tmp_path / "it").rename(tmp_path / names[0])


def test_a_failure_while_loading_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyquant.io.pretrained import load as pretrained
    from pyquant.nn import swap

    pyquant.save_pretrained(quantised(), tmp_path)
    for owner, name in ((swap, "put"), (pretrained, "check_no_meta"), (pretrained, "module_of")):
        whole, calls = getattr(owner, name), 0

        def fails(*args: Any, whole: Any = whole) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2 or whole.__name__ == "check_no_meta":
                raise KeyboardInterrupt
            return whole(*args)

        skeleton = Net()
        before = skeleton.state_dict(keep_vars=True)
        monkeypatch.setattr(owner, name, fails)
        with pytest.raises(KeyboardInterrupt):
            pyquant.load_pretrained(tmp_path, skeleton)
        monkeypatch.setattr(owner, name, whole)
        after = skeleton.state_dict(keep_vars=True)
        assert list(after) == list(before)
        assert all(after[key] is before[key] for key in before)
        assert not any(isinstance(m, pyquant.QLinear) for m in skeleton.modules())


def test_parts_that_torch_compile_was_given_have_their_names(tmp_path: Path) -> None:
    model = quantised()
    want = model(IDS)
    names = {name: type(module) for name, module in model.named_children()}
    for name, child in list(model.named_children())[:2]:
        setattr(model, name, torch.compile(child, backend="eager"))
    pyquant.save_pretrained(model, tmp_path)
    assert any(type(module) is not names[name] for name, module in model.named_children()), "as it was"
    assert torch.equal(pyquant.load_pretrained(tmp_path, Net).eval()(IDS), want)
