"""On a GPU every operation is a launch: what a search launches must not grow with the weights. Tensors without numbers
stand for the GPU's, as they too are on no CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pyquant
from pyquant.calibrate import weights
from pyquant.calibrate.methods import mse
from pyquant.calibrate.methods.entropy import divergences
from pyquant.calibrate.short_rows import least_squares_steps
from pyquant.numerics.passes import ON_DEVICES, at_once
from pyquant.numerics.two_level import two_level_scales

RATIOS = torch.exp2(-torch.arange(80, dtype=torch.float64) / 32)


class Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += not getattr(func, "is_view", False)  # which launches nothing
        assert "local_scalar" not in str(func) or not args[0].is_meta  # waits for the device
        return func(*args, **(kwargs or {}))


def calls(run: Callable[[Tensor], object], *shape: int) -> int:
    with Count() as count:
        run(torch.empty(*shape, device="meta"))
    return count.calls


SEARCHES: dict[str, tuple[Callable[[Tensor], object], tuple[int, int]]] = {
    "mse of groups": (lambda w: least_squares_steps(w.reshape(-1, 128), -7, 7, RATIOS), (64, 128)),
    "two levels": (lambda w: two_level_scales(w, w[:, ::128], -7, 7), (64, 4096)),
    "entropy": (lambda w: divergences(w.double(), w[:, :1].double(), 7), (2, 512)),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_launches_as_much_for_many_weights_as_for_few(name: str) -> None:
    run, (n, k) = SEARCHES[name]
    few, many = calls(run, n, k), calls(run, n * (16 if name == "entropy" else ON_DEVICES // (n * k)), k)
    assert many <= few  # which may also fill a cache
    assert many < 3000


def test_groups_go_to_the_search_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def spied(rows: Tensor, *how: Any) -> Tensor:
        seen.append(len(rows))
        return least_squares_steps(rows, *how)

    monkeypatch.setattr(mse, "least_squares_steps", spied)
    weight = torch.randn(4096, 256)
    scheme = pyquant.W4A16(group_size=128).weights
    found = weights.weight_range(weight, scheme)
    assert seen == [8192]
    parts = [weights.weight_range(part, scheme) for part in weight.split(1000)]
    assert all(torch.equal(found[end], torch.cat([part[end] for part in parts])) for end in (0, 1))


def test_parts_are_small_on_a_cpu_only() -> None:
    assert at_once(torch.device("cpu"), 7) == 7
    assert at_once(torch.device("cuda", 1), 7) == ON_DEVICES
