"""Blocks whose float weights stay in the files of a checkpoint: read when a block runs, let go when it has run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.calibrate import weight_qparams
from pyquant.io.pretrained.float_weights import FloatWeights
from pyquant.nn.forms import form_of
from pyquant.nn.sites import Owner
from pyquant.ptq.blockwise.saved import found_in, put_found
from pyquant.ptq.improve.matrix import Layer, matrix_of
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.float_model import float_parameters, keep_originals

_State = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


class FromFiles:
    """The residence of the blocks of a model with simulating layers, all of it on the meta device at first.

    weights   the model's numbers, by the names of before the layers simulated.
    owners    modules that had linear forms then; those whose form has taken their place are read through it.
    facts     what the files are known by.
    """

    def __init__(self, model: nn.Module, weights: FloatWeights, owners: Sequence[Owner], facts: str) -> None:
        self._model, self._weights, self._facts = model, weights, facts
        self._owners = {id(form): owner for owner in owners if (form := self._at(owner.names[0])) is not owner.module}
        self._names: dict[int, str] = {}
        self._found: dict[str, list[Path]] = {}
        self._empty: dict[int, dict[nn.Module, _State]] = {}
        for module in model.modules():
            for fake in getattr(module, "fake_quantizers", dict)().values():
                if fake is not getattr(module, "weight_fake_quant", None):
                    _on_cpu(fake)

    def _at(self, name: str) -> nn.Module:
        return self._model.get_submodule(name)

    @property
    def fingerprint(self) -> str:
        """The files, the model's classes and schemes, static ranges, and what was found for blocks so far."""
        hasher = hashlib.sha256(f"{self._facts}\n{self._model}\n".encode())
        for name, tensor in sorted(self._model.state_dict().items()):
            if name.endswith(("put_fake_quant.scale", "put_fake_quant.zero_point")):
                hasher.update(f"{name} {tensor.tolist()}\n".encode())
        for block, paths in sorted(self._found.items()):
            hasher.update(f"{block} {[path.name for path in paths]}\n".encode())
        return hasher.hexdigest()

    def settle(self, blocks: Mapping[str, nn.Module]) -> None:
        """Everything outside of the blocks is read, to stay; from here on these can be brought."""
        self._names = {id(block): name for name, block in blocks.items()}
        self._fill(self._model, "", {}, set(self._names))
        inside = {id(module) for block in blocks.values() for module in block.modules()}
        for layer in (m for m in self._model.modules() if isinstance(m, Layer) and id(m) not in inside):
            _renew(layer, {})

    def bring(self, block: nn.Module) -> None:
        """The block has its numbers; where it rounds also what was found for its layers, and ranges of its weights."""
        name = self._names[id(block)]
        self._empty[id(block)] = {module: _state_of(module) for module in block.modules()}
        self._fill(block, name, {}, set())
        layers = {at: m for at, m in block.named_modules(prefix=name) if isinstance(m, Layer)}
        is_float = all(layer.weight_fake_quant.mode == "off" for layer in layers.values())
        found = [] if is_float else [found_in(path) for path in self._found.get(name, ())]
        for at, layer in layers.items():
            _renew(layer, {at: layer}, *found)

    def leave(self, block: nn.Module) -> None:
        """The block is as it was before it was brought, but for the ranges of inputs and outputs."""
        for module, before in self._empty.pop(id(block), {}).items():
            holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
            for held, was in zip(holders, before, strict=True):
                held.clear()
                held.update(was)
            if isinstance(module, Layer):
                module.originals = None
                if "bias" not in module._parameters:  # it has none: nn.Module forgot so when it was given one
                    module.__dict__["bias"] = None

    def finished(self, block: str, found: Path) -> None:
        """What an improver has found for a block; after what those before it have."""
        paths = self._found.setdefault(block, [])
        if found not in paths:
            paths.append(found)

    def _fill(self, module: nn.Module, name: str, made: dict[int, nn.Parameter], passed: set[int]) -> None:
        """Reads a module and what is in it, but for the modules of these ids. made: parameters by those on meta."""
        if id(module) in passed or isinstance(module, FakeQuantize):
            return
        passed.add(id(module))
        owner = self._owners.get(id(module))
        if owner is not None:
            form = form_of(self._weights.filled(owner.module, owner.names[0]))
            for place, part in form.named_modules():
                _put(module.get_submodule(place), part._parameters, part._buffers)
            passed |= {id(part) for part in module.modules()}
            return
        at = f"{name}." if name else ""
        for key, old in module._parameters.items():
            if old is not None and id(old) not in made:
                made[id(old)] = nn.Parameter(self._weights.read(at + key), old.requires_grad)
        parameters = {key: None if old is None else made[id(old)] for key, old in module._parameters.items()}
        kept = module._non_persistent_buffers_set
        buffers = {k: self._weights.read(at + k) for k, t in module._buffers.items() if t is not None and k not in kept}
        _put(module, parameters, buffers)
        for key, child in module._modules.items():
            if child is not None:
                self._fill(child, at + key, made, passed)


def _state_of(module: nn.Module) -> _State:
    return dict(module._parameters), dict(module._buffers), dict(module._modules)


def _put(module: nn.Module, parameters: Mapping[str, Any], buffers: Mapping[str, Tensor | None]) -> None:
    module._parameters.update(parameters)
    module._buffers.update({key: t for key, t in buffers.items() if t is not None and not t.is_meta})


def _renew(layer: Layer, names: Mapping[str, Layer], *found: Mapping[str, Tensor]) -> None:
    """A layer around the float weights that it has now, with what was found for it."""
    old = layer.weight_fake_quant
    fake = FakeQuantize(
        old.scheme,
        tuple(layer.scheme.weights.scale_shape(matrix_of(layer).shape)),
        follows=old.follows,
        device=matrix_of(layer).device,
    )
    fake.mode, fake.method_is_open, fake.learn_amax = old.mode, old.method_is_open, old.learn_amax
    layer.weight_fake_quant, layer.originals = fake.train(layer.training), None
    floats = float_parameters(layer)
    for tensors in found:
        put_found(tensors, names)
    if layer.weight is not floats[0] or layer.bias is not floats[1]:
        keep_originals(layer, floats)
    fake = layer.weight_fake_quant
    if fake.mode != "off" and not fake.is_calibrated and fake.scheme.calibrator != "fixed":
        fake.set_qparams(*weight_qparams(matrix_of(layer).detach(), fake.scheme))


def _on_cpu(fake: FakeQuantize) -> None:
    for key, tensor in fake._buffers.items():
        if tensor is not None and tensor.is_meta:
            value = torch.nan if tensor.is_floating_point() else 0
            fake._buffers[key] = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
