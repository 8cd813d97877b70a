"""Small models for the tests of selective quantisation: blocks with a residual, shared layers, a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyquant.integrations.super_gradients import QuantResidual


class Block(nn.Module):
    """y = relu(x + fc2(relu(fc1(x))))."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.fc2(self.act(self.fc1(x))))


class QuantBlock(Block):
    """Block whose residual operand is quantised too."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.residual = QuantResidual()

    @classmethod
    def from_float(cls, block: Block) -> QuantBlock:
        new = cls()
        new.fc1, new.act, new.fc2 = block.fc1, block.act, block.fc2
        return new

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.residual(x) + self.fc2(self.act(self.fc1(x))))


class Net(nn.Module):
    """stem, two stages of blocks, a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(6, 8)
        self.stage1 = nn.Sequential(Block(), Block())
        self.stage2 = nn.Sequential(Block())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.stage1(self.stem(x))))


def batches(count: int = 4, rows: int = 16, width: int = 6, seed: int = 1) -> list[Tensor]:
    """Batches of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=generator) for _ in range(count)]


def kinds(model: nn.Module) -> dict[str, str]:
    """{name: class} of everything that is a layer or a block."""
    found = {name: type(m).__name__ for name, m in model.named_modules() if name}
    return {n: k for n, k in found.items() if k.endswith(("Linear", "Block"))}


def snapshot(model: nn.Module) -> tuple[dict[str, tuple[int, str]], dict[str, Tensor]]:
    """The modules by identity and the state by value: what a failed call must not change."""
    modules = {n: (id(m), str(m.training)) for n, m in model.named_modules(remove_duplicate=False)}
    return modules, {n: t.clone() for n, t in model.state_dict().items()}


def is_unchanged(model: nn.Module, before: tuple[dict[str, tuple[int, str]], dict[str, Tensor]]) -> bool:
    now = snapshot(model)
    same = now[1].keys() == before[1].keys() and all(
        torch.equal(
            now[1][n].nan_to_num(-7) if now[1][n].is_floating_point() else now[1][n],
            before[1][n].nan_to_num(-7) if before[1][n].is_floating_point() else before[1][n],
        )
        for n in now[1]
    )
    return same and now[0] == before[0]
