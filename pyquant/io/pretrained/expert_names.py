"""Names of files that know experts one by one (`experts.3.gate_proj`, Mixtral's `w1`), for models that hold banks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.nn.expert_rules import ExpertsRule, rule_of
from pyquant.nn.experts import QExperts

_UP: Final = "gate_up_proj"  # gate before up: what the name says
# which matrix of an expert each name is: of `up` the gate or the up channels, or `down`
_PARTS: Final = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
_DOWN: Final = 2
_EXPERT: Final = re.compile(r"(.+)\.(\d{1,6})\.(\w+)")
_OLD, _NEW = ".block_sparse_moe.", ".mlp."  # what Mixtral's files, and transformers before 5, call the block


@dataclass(frozen=True)
class Place:
    """Where a matrix of a file stands in the model: a module, and of two halves which (None: all of it)."""

    module: str
    half: int | None = None


@dataclass(frozen=True)
class _Bank:
    rule: ExpertsRule
    interleaved: bool


class ExpertNames:
    """The banks of a model, and where in them the matrices of a file stand."""

    def __init__(self, model: nn.Module) -> None:
        self._banks: dict[str, _Bank] = {}
        self._renames = not any(_OLD in f".{name}." for name, _ in model.named_modules())
        for name, module in model.named_modules(remove_duplicate=False):
            rule = module.rule if isinstance(module, QExperts) else rule_of(module)
            if rule is not None:
                held: Any = module.__dict__.get("_self_of_gate", module)
                self._banks[name] = _Bank(rule, not getattr(held, "is_concatenated", True))

    def renamed(self, name: str) -> str:
        """A tensor of the file under the name that its block has in the model."""
        return name.replace(_OLD, _NEW) if self._banks and self._renames else name

    def place(self, layer: str) -> Place:
        """Where a layer of the file stands; layers of no bank stand where their names say."""
        layer = self.renamed(f"{layer}.").removesuffix(".")
        found = _EXPERT.fullmatch(layer)
        bank = self._banks.get(found[1]) if found else None
        if found is None or bank is None or found[3] in (bank.rule.up, bank.rule.down):
            return Place(layer)
        part = _PARTS.get(found[3])
        if part == _DOWN:
            return Place(f"{found[1]}.{found[2]}.{bank.rule.down}")
        if part is None or bank.rule.up != _UP:
            return Place(layer)
        return Place(f"{found[1]}.{found[2]}.{_UP}", part)

    def is_interleaved(self, module: str) -> bool:
        """Whether gate and up channels alternate in a layer of a bank."""
        return self._banks[_bank_of(module)].interleaved

    def quantised(self, modules: Iterable[str]) -> set[str]:
        """The banks that have any of these layers."""
        return {_bank_of(module) for module in modules} & self._banks.keys()

    def is_router(self, module: str) -> bool:
        """Whether a module chooses the experts of a bank: it stands beside it."""
        parent, _, name = module.rpartition(".")
        return name in ("gate", "router") and f"{parent}.experts" in self._banks

    def floats(self, tensors: Mapping[str, Tensor], exposed: set[str]) -> dict[str, Tensor]:
        """The floating-point tensors of a file as the model holds them: halves joined, and the experts of a bank that
        is not in `exposed` in one parameter. What has no other half, or lacks experts, stays for check_keys to name."""
        whole: dict[str, Tensor] = {}
        halves: dict[str, dict[int, tuple[str, Tensor]]] = {}
        for key, tensor in tensors.items():
            layer, _, kind = key.rpartition(".")
            place = self.place(layer)
            name = f"{place.module}.{kind}"
            if place.half is None:
                whole[name if layer else key] = tensor
            else:
                halves.setdefault(name, {})[place.half] = (key, tensor)
        for name, parts in halves.items():
            if len(parts) == 2 and parts[0][1].shape == parts[1][1].shape:
                both, at = [parts[0][1], parts[1][1]], name.rpartition(".")[0]
                whole[name] = torch.stack(both, 1).flatten(0, 1) if self.is_interleaved(at) else torch.cat(both)
            else:
                whole.update(parts.values())
        for path, bank in self._banks.items():
            if path not in exposed:
                _stack(whole, path, bank.rule)
        return whole


def _bank_of(module: str) -> str:
    """Of the layer of an expert, 'model.experts.3.down_proj', the bank."""
    return module.rpartition(".")[0].rpartition(".")[0]


def _stack(tensors: dict[str, Tensor], path: str, rule: ExpertsRule) -> None:
    """Replace the tensors of single experts by the parameters of their bank, where all are there and of one shape."""
    for name, kind, parameter in (
        (rule.up, "weight", rule.up),
        (rule.down, "weight", rule.down),
        (rule.up, "bias", rule.up_bias),
        (rule.down, "bias", rule.down_bias),
    ):
        keys: list[str] = []
        while (key := f"{path}.{len(keys)}.{name}.{kind}") in tensors:
            keys.append(key)
        if not keys or not parameter or len({tensors[key].shape for key in keys}) > 1:
            continue
        parts = [tensors.pop(key) for key in keys]
        if kind == "weight" and rule.is_transposed:
            parts = [part.mT for part in parts]
        tensors[f"{path}.{parameter}"] = torch.stack(parts)
