"""rotate_ for a model in files: the same seeded matrices turn the parameters of a block after those of another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyquant.ptq.improve.rotate import ALLOWED, Turning, known_specs
from pyquant.ptq.shards.block_files import OUTSIDE, BlockFiles
from pyquant.ptq.shards.floats import Floats, Run, rewritten
from pyquant.ptq.shards.outline import tensors_in


def rotated(floats: Floats, run: Run, *, seed: int = 0, online: bool = False) -> Floats:
    """What rotate_ does, a parameter at a time: what is to be done to each is known from the model without its numbers,
    but for those of norms."""
    name = "rotate_online" if online else "rotate"
    turning = _Plan(name, floats, run, seed, online)
    return rewritten(floats, run, name, "spec", ALLOWED, turning.write, turning.change)


class _Plan:
    """What is to be done to the parameters of a model, known without its numbers but for those of norms."""

    def __init__(self, name: str, floats: Floats, run: Run, seed: int, online: bool) -> None:
        self._name, self._floats, self._run, self._seed = name, floats, run, seed
        self._specs = known_specs(run.model, online)
        self._keys: dict[int, str] = {}  # of tensors: where their numbers are found
        self._held: list[Tensor] = []  # so that no id is given twice
        self._value: Callable[[Tensor], Tensor] = self._read

    def change(self) -> None:
        """The model gets the modules and parameters that it has afterwards."""
        state = self._run.model.state_dict(keep_vars=True)
        for key, tensor in state.items():
            self._keys.setdefault(id(tensor), key)
        generator = torch.Generator().manual_seed(self._seed)
        for _, root, spec in self._specs:
            turning = Turning(root, self._run.undo, generator, [], self._value)
            for _ in turning.of(spec):
                pass
            self._value = turning.value
        for key, tensor in self._run.model.state_dict(keep_vars=True).items():
            if id(tensor) not in self._keys and key in self._floats.weights:  # a head that was tied
                self._keys[id(tensor)] = key
        self._held += state.values()

    def write(self, files: BlockFiles) -> None:
        blocks = self._run.blocks()
        for done, (name, block) in enumerate(blocks.items(), 1):
            if name not in files:
                files.add(name, self._turned(block.state_dict(prefix=f"{name}.", keep_vars=True)))
            if self._run.way.progress is not None:
                self._run.way.progress(done, len(blocks), f"{self._name} {name}")
        if OUTSIDE not in files:
            state = self._run.model.state_dict(keep_vars=True)
            files.add(OUTSIDE, self._turned({key: state[key] for key in tensors_in(self._run.model, "", blocks)}))

    def _turned(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: self._value(tensor) for key, tensor in state.items() if isinstance(tensor, Tensor)}

    def _read(self, tensor: Tensor) -> Tensor:
        key = self._keys.get(id(tensor))
        if key is None:  # a bias that a Linear got for that of its norm
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        return self._floats.weights.read(key).detach()
