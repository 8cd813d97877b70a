"""fold_batch_norm_: the folded numbers are those of the float64 formula, and only what may be folded is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.core.presets import W8A8Dynamic
from pyquant.errors import ArgumentError, NonFiniteError


def norm(kind: type[nn.Module], features: int, **options: Any) -> nn.Module:
    """A BatchNorm with statistics and parameters that show."""
    made: Any = kind(features, **options)
    if made.track_running_stats:
        made.running_mean.copy_(torch.randn(features))
        made.running_var.copy_(torch.rand(features) * 4 + 0.1)
    if made.affine:
        made.weight = nn.Parameter(torch.randn(features))
        made.bias = nn.Parameter(torch.randn(features))
    return made


CASES: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(6, 5), lambda: norm(nn.BatchNorm1d, 5), (7, 6)),
    (lambda: nn.Linear(6, 5, bias=False), lambda: norm(nn.BatchNorm1d, 5, affine=False, eps=0.5), (7, 6)),
    (lambda: nn.Conv2d(3, 5, 3, bias=False), lambda: norm(nn.BatchNorm2d, 5, eps=1e-3), (2, 3, 6, 6)),
    (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), lambda: norm(nn.BatchNorm2d, 6), (2, 4, 6, 6)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "make_norm", "shape"), CASES, ids=range(len(CASES)))
def test_the_numbers_are_those_of_the_formula(
    make: Callable[[], nn.Module], make_norm: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    layer, bn = make().to(dtype), make_norm()
    model = nn.Sequential(layer, bn, nn.ReLU()).eval()
    plain: Any = copy.deepcopy(model)
    assert pyquant.fold_batch_norm_(model) is model
    assert type(model[1]) is nn.Identity
    weight, bias, n = plain[0].weight.double(), plain[0].bias, plain[1]
    factor = (1.0 if n.weight is None else n.weight.double()) / (n.running_var.double() + n.eps).sqrt()
    wanted = torch.stack([w * f for w, f in zip(weight, factor)])
    assert torch.equal(model[0].weight, wanted.to(dtype))
    shift = (0 if bias is None else bias.double()) - n.running_mean.double()
    assert torch.equal(model[0].bias, (shift * factor + (0 if n.bias is None else n.bias.double())).to(dtype))
    if dtype == torch.float32:
        x = torch.randn(shape)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.requires_grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = norm(nn.BatchNorm2d, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


pyquant.register_batch_norm(Block, "conv", "bn")
pyquant.register_fusion(Block, "conv", "act")


def test_a_registered_pair_folds_and_its_activation_fuses_only_then() -> None:
    x = torch.randn(1, 3, 5, 5)
    model = nn.Sequential(Block()).eval()
    early = pyquant.fuse_(pyquant.quantize_(copy.deepcopy(model), W8A8Dynamic()))
    assert early[0].conv.activation == "none"
    assert type(early[0].act) is nn.ReLU
    expected = model(x)
    late = pyquant.fuse_(pyquant.quantize_(pyquant.fold_batch_norm_(copy.deepcopy(model)), W8A8Dynamic()))
    assert late[0].conv.activation == "relu"
    assert type(late[0].bn) is type(late[0].act) is nn.Identity
    assert (late(x) - expected).norm() < 0.05 * expected.norm()


def test_linear_norm_activation_in_a_sequence() -> None:
    model = nn.Sequential(nn.Linear(8, 8), norm(nn.BatchNorm1d, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    model = pyquant.fuse_(pyquant.quantize_(pyquant.fold_batch_norm_(model), W8A8Dynamic()))
    assert model[0].activation == "gelu"
    assert [type(m).__name__ for m in model] == ["QLinear", "Identity", "Identity", "QLinear"]


def test_what_must_not_be_folded_is_left_alone() -> None:
    shared = nn.Linear(4, 4)
    tied = nn.Linear(4, 4)
    twin = nn.Linear(4, 4)
    twin.weight = tied.weight
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *a: None)
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    models = [
        nn.Sequential(shared, norm(nn.BatchNorm1d, 4), shared),
        nn.Sequential(tied, norm(nn.BatchNorm1d, 4), twin),
        nn.Sequential(hooked, norm(nn.BatchNorm1d, 4)),
        nn.Sequential(computed, norm(nn.BatchNorm1d, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), norm(nn.BatchNorm1d, 4)),
        nn.Sequential(nn.Linear(4, 4), norm(nn.BatchNorm1d, 4, track_running_stats=False)),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm1d(4)),
    ]
    for model in models:
        before = {name: id(m) for name, m in model.named_modules()}
        pyquant.fold_batch_norm_(model.eval())
        assert {name: id(m) for name, m in model.named_modules()} == before


def test_training_mode_and_broken_statistics_are_refused_and_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), norm(nn.BatchNorm1d, 4), nn.Linear(4, 4), norm(nn.BatchNorm1d, 4))
    model.eval()[3].train()
    weight = model[0].weight
    with pytest.raises(ArgumentError, match="'3' in training mode"):
        pyquant.fold_batch_norm_(model)
    model.eval()
    model[3].running_var[1] = -1.0  # type: ignore[index]
    with pytest.raises(NonFiniteError, match="'3'"):
        pyquant.fold_batch_norm_(model)
    assert model[0].weight is weight
    assert type(model[1]) is nn.BatchNorm1d
    with pytest.raises(ArgumentError, match="3 features after 4"):
        pyquant.fold_batch_norm_(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3)).eval())


def test_a_folded_model_is_saved_and_loaded(tmp_path: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm(nn.BatchNorm2d, 4), nn.ReLU()).eval()

    def folded() -> nn.Module:
        return pyquant.fold_batch_norm_(build())

    model = pyquant.fuse_(pyquant.quantize_(folded(), W8A8Dynamic()))
    pyquant.save_pretrained(model, tmp_path)
    again = pyquant.load_pretrained(tmp_path, folded)
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(again(x), model(x))
    with pytest.raises(pyquant.CheckpointError, match="fold_batch_norm_"):
        pyquant.load_pretrained(tmp_path, build)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()).eval()
    assert torch.equal(pyquant.load_pretrained(tmp_path, pyquant.fold_batch_norm_(empty))(x), model(x))
