"""rotate_: orthogonal maps folded into the weights spread outliers over all channels; the function stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.modes import evaluating
from pyquant.errors import ArgumentError
from pyquant.nn.flow import call
from pyquant.nn.hadamard_linear import HadamardLinear, turned_weight
from pyquant.nn.linear_state import LinearState
from pyquant.nn.listed import exchange_listed
from pyquant.nn.undo import Undo, put, undone_on_error
from pyquant.numerics.hadamard import largest_block, power_scale
from pyquant.ptq.improve.orthogonal import Rotation
from pyquant.ptq.improve.replay import check_unmoved
from pyquant.ptq.improve.rotate_rules import RotationSpec, filled, matching, specs_of
from pyquant.ptq.improve.smooth_rules import RMS_NORMS
from pyquant.ptq.improve.writable import check_writable
from pyquant.simulate.kinds import is_simulated

ALLOWED: Final = "a spec that names every writer and reader of the stream"


@torch.no_grad()
def rotate_(
    model: nn.Module,
    example_inputs: object,
    spec: RotationSpec | None = None,
    *,
    seed: int = 0,
    online: bool = False,
) -> dict[str, int]:
    """Turn the residual stream, and the values of attention head by head, by random Hadamard matrices, in place.

    model     float nn.Module, before quantisation; its parameters are changed in place.
    example_inputs   what the model is called with to see that its output stays: one tensor, a tuple of positional or a
              mapping of named arguments.
    spec      who writes and reads the stream; None: what is known of the model's class (register_rotation; Llama,
              Mistral, Qwen2 and Qwen3 of transformers, for causal language modelling or classification).
    seed      of the random signs, at least 0.
    online    of the known classes, whether the inputs of down projections are turned too, at run time: each becomes a
              HadamardLinear. A spec says it by its own `online`.
    ->        {Linear whose inputs are spread now: channels over which}.
    Weights of norms move into the Linears that read them (and norms' biases into their biases); a head that is tied to
    the embedding gets a weight of its own. Computed in float64 and rounded once. The function is the same but for that
    rounding: the output for example_inputs is compared, and where it moves everything is undone.
    Raises ArgumentError for a spec that does not fit, a model that moves or is quantised already.
    Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv 2404.00456, section 4; Liu et
    al., "SpinQuant: LLM quantization with learned rotations", arXiv 2405.16406, figure 1 (R1, R2; online: R4).

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.norm, self.fc1, self.fc2 = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        ...     def forward(self, x):
        ...         return x + self.fc2(self.fc1(self.norm(x)).relu())
        >>> model = nn.Sequential(nn.Linear(4, 8), Block(), nn.RMSNorm(8), nn.Linear(8, 2))
        >>> spec = RotationSpec(writers=["0", "1.fc2"], readers={"1.norm": ["1.fc1"], "2": ["3"]})
        >>> rotate_(model, torch.randn(5, 4), spec)
        {'1.fc1': 8, '3': 8}
    """
    return rotate_reversibly(model, example_inputs, spec, seed, online, [])


@dataclass(frozen=True)
class Turned:
    """A residual stream that was turned: its channels, the parameters that hold them, each with the dimension, and
    whether its matrix keeps the ones."""

    width: int
    parameters: list[tuple[Tensor, int]]
    keeps_ones: bool


@torch.no_grad()
def rotate_reversibly(
    model: nn.Module,
    example_inputs: object,
    spec: RotationSpec | None,
    seed: int,
    online: bool,
    undo: list[Undo],
    then: Sequence[Tensor] = (),
    streams: list[Turned] | None = None,
) -> dict[str, int]:
    """rotate_ for a caller that may still fail. undo  receives the steps that take it back.

    then     for each residual stream an orthogonal matrix that follows the Hadamard matrix; none: there is no more.
    streams  receives what was turned of each.
    """
    arguments.module("model", model)
    arguments.whole("seed", seed, 0, 2**63 - 1)
    if spec is not None and not isinstance(spec, RotationSpec):
        raise ArgumentError("spec", arguments.shown(spec), "a RotationSpec, or None")
    if arguments.flag("online", online) and spec is not None:
        raise ArgumentError("online", "True beside a spec", "the names in RotationSpec(online=[...])")
    if any(is_simulated(m) or isinstance(m, LinearState) for m in model.modules()):
        raise ArgumentError("model", "a model with quantised layers", "a float model: rotate before quantising")
    check_writable(model)
    found = [("", model, spec)] if spec is not None else known_specs(model, online)
    generator = torch.Generator().manual_seed(seed)
    with evaluating(model), undone_on_error() as steps:
        before = call(model, example_inputs)
        spread: dict[str, int] = {}
        following = list(then)
        for prefix, root, known in found:
            turning = Turning(root, steps, generator, following)
            spread |= {prefix + name: size for name, size in turning.of(known)}
            turning.finish()
            if streams is not None:
                streams += turning.streams
        check_unmoved("spec", before, call(model, example_inputs), f"{ALLOWED}; everything is undone")
    undo += steps
    return spread


def known_specs(model: nn.Module, online: bool) -> list[tuple[str, nn.Module, RotationSpec]]:
    """(prefix of its names, module, spec) of all that is known of a model. Raises ArgumentError for nothing."""
    found = list(specs_of(model, online))
    if not found:
        got = f"a {type(model).__name__} of which no rule knows the residual stream"
        raise ArgumentError("model", got, "spec=RotationSpec(...), or pyquant.register_rotation for its class")
    return found


class Turning:
    """What is to be done to every parameter of a model, and its doing, with the steps that take it back.

    numbers  what a parameter holds, where that is not in itself: then `value` is asked for what becomes of it.
    """

    def __init__(
        self,
        model: nn.Module,
        undo: list[Undo],
        generator: torch.Generator,
        following: list[Tensor],
        numbers: Callable[[Tensor], Tensor] = torch.Tensor.detach,
    ) -> None:
        self.model, self.undo, self.generator, self.following, self.numbers = model, undo, generator, following, numbers
        self.streams: list[Turned] = []
        self._steps: dict[int, tuple[Tensor, list[Callable[[Tensor], Tensor]]]] = {}
        self.modules, self.parameters = dict(model.named_modules()), dict(model.named_parameters())

    def of(self, spec: RotationSpec) -> Iterator[tuple[str, int]]:
        """All that a spec names. -> (Linear whose inputs are spread, channels over which)."""
        yield from self.stream(spec)
        yield from self.heads(spec)
        yield from self.online(spec)

    def stream(self, spec: RotationSpec) -> Iterator[tuple[str, int]]:
        """Turn what writes and reads the residual stream. -> (reader, channels)."""
        written = dict(item for name in spec.writers for item in self._written(name))
        norms = [
            (norm, [self._linear(filled(reader, parts)) for reader in readers])
            for pattern, readers in spec.readers.items()
            for norm, parts in self._find(pattern)
        ]
        names = [name for _, readers in norms for name, _ in readers]
        if len(set(names)) < len(names):
            raise ArgumentError("spec", "a Linear that reads two norms", "one norm for each Linear")
        if not norms:
            return
        width = norms[0][1][0][1].in_features
        for name, size in (
            *((name, parameter.shape[dim]) for name, (parameter, dim) in written.items()),
            *((name, linear.in_features) for _, readers in norms for name, linear in readers),
        ):
            if size != width:
                raise ArgumentError("spec", f"'{name}' of {size} channels", f"the {width} of '{names[0]}'")
        keeps_ones = not all(_is_rms(self.modules[norm]) for norm, _ in norms)
        rotation = Rotation(width, self.generator, keeps_ones, self.following.pop(0) if self.following else None)
        self._untie(
            {id(parameter) for parameter, _ in written.values()}, [r for _, readers in norms for _, r in readers]
        )
        for norm, readers in norms:
            self._fold(norm, [linear for _, linear in readers])
        turned: list[tuple[Tensor, int]] = list({id(item[0]): item for item in written.values()}.values())
        turned += [(linear.weight, 1) for _, readers in norms for _, linear in readers]
        for parameter, dim in turned:
            self._turn(parameter, rotation, dim)
        self.streams.append(Turned(width, turned, keeps_ones))
        yield from ((name, width) for name in names)

    def heads(self, spec: RotationSpec) -> Iterator[tuple[str, int]]:
        """Turn the values of attention and their reader. -> (reader, channels of a head)."""
        for pair in spec.heads:
            for name, parts in self._find(pair.values):
                _, values = self._linear(name)
                output_name, output = self._linear(filled(pair.output, parts))
                first, end = pair.rows or (0, values.out_features)
                if end > values.out_features or (end - first) % pair.size:
                    got = f"rows {first} to {end} of '{name}', [{values.out_features}, {values.in_features}]"
                    raise ArgumentError("heads", got, f"rows that are heads of {pair.size} channels")
                if output.in_features % pair.size:
                    got = f"'{output_name}' of {output.in_features} inputs"
                    raise ArgumentError("heads", got, f"a multiple of {pair.size}")
                rotation = Rotation(pair.size, self.generator, keeps_ones=False)
                for parameter in values.parameters(recurse=False):
                    self._turn(parameter, rotation, 0, slice(first, end))
                self._turn(output.weight, rotation, 1)
                yield output_name, pair.size

    def online(self, spec: RotationSpec) -> Iterator[tuple[str, int]]:
        """Wrap what turns its inputs at run time, and turn its weight. -> (Linear, channels of a block)."""
        for pattern in spec.online:
            for name, _ in self._find(pattern):
                _, linear = self._linear(name)
                block = largest_block(linear.in_features)
                if type(linear) is not nn.Linear or block == 1:
                    got = f"'{name}', a {type(linear).__name__} of {linear.in_features} inputs"
                    raise ArgumentError("online", got, "nn.Linears of an even number of inputs")
                scale = power_scale(block)
                self._later(linear.weight, partial(turned_weight, block=block, scale=scale))
                wrapped = HadamardLinear(linear, block, scale).train(linear.training)
                for parent in self.modules.values():
                    for child in [child for child, module in parent._modules.items() if module is linear]:
                        put(parent._modules, child, wrapped, self.undo)
                exchange_listed(self.modules.values(), {id(linear): wrapped}, self.undo)
                yield name, block

    def finish(self) -> None:
        """Do to each parameter all that is to be done to it."""
        # biases first, which ask for weights as these were
        for parameter, _ in sorted(self._steps.values(), key=lambda item: item[0].dim() > 1):
            self.undo.append(partial(parameter.detach().copy_, parameter.detach().clone()))
            parameter.detach().copy_(self.value(parameter))

    def value(self, parameter: Tensor) -> Tensor:
        """What becomes of a parameter, computed in float64 and rounded once."""
        before = self.numbers(parameter)
        steps = self._steps.get(id(parameter), (parameter, []))[1]
        value = before.double() if steps else before
        for step in steps:
            value = step(value)
        return value.to(before.dtype)

    # ---- what is meant

    def _find(self, pattern: str) -> list[tuple[str, tuple[str, ...]]]:
        found = matching(self.modules, pattern)
        if not found:
            raise ArgumentError("spec", repr(pattern), f"names of modules of the {type(self.model).__name__}")
        return found

    def _linear(self, name: str) -> tuple[str, nn.Linear]:
        module = self.modules.get(name)
        if not isinstance(module, nn.Linear):
            got = f"'{name}', {'a ' + type(module).__name__ if module is not None else 'no module of the model'}"
            raise ArgumentError("spec", got, "a Linear (pyquant.expose_linears_ makes them of other classes)")
        return name, module

    def _written(self, pattern: str) -> Iterator[tuple[str, tuple[nn.Parameter, int]]]:
        """Parameters of a writer by name, each with the dimension that holds the channels."""
        for name, _ in matching(self.parameters, pattern):
            yield name, (self.parameters[name], -1)
        modules = matching(self.modules, pattern) if pattern not in self.parameters else []
        for name, _ in modules or ([] if matching(self.parameters, pattern) else self._find(pattern)):
            module = self.modules[name]
            if not isinstance(module, (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)):
                got = f"'{name}', a {type(module).__name__}"
                raise ArgumentError("spec", got, "writers: Linears, convolutions, nn.Embeddings and parameters")
            for own, parameter in module.named_parameters(recurse=False):
                yield f"{name}.{own}", (parameter, 1 if isinstance(module, nn.Embedding) else 0)

    # ---- what is done

    def _untie(self, written: set[int], readers: list[nn.Linear]) -> None:
        """A head that shares the embedding's weight needs its own: the one is turned after its norm, the other not."""
        tied = [linear for linear in readers if id(linear.weight) in written]
        for linear in tied:
            own = nn.Parameter(linear.weight.detach().clone(), linear.weight.requires_grad)
            put(cast("dict[str, Any]", linear._parameters), "weight", own, self.undo)
        for module in self.model.modules() if tied else ():
            config = getattr(module, "config", None)
            if getattr(config, "tie_word_embeddings", False):
                put(config.__dict__, "tie_word_embeddings", False, self.undo)

    def _fold(self, name: str, readers: list[nn.Linear]) -> None:
        """The weight and bias of a norm become part of the Linears that read it."""
        norm = self.modules[name]
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        scale, shift = (None if p is None else self.numbers(p).to(torch.float64, copy=True) for p in (weight, bias))
        for parameter in (weight, bias):
            if parameter is not None and tuple(parameter.shape) != (readers[0].in_features,):
                got = f"'{name}' with a parameter {list(parameter.shape)}"
                raise ArgumentError("spec", got, f"a norm over {readers[0].in_features} channels")
        for linear in readers:
            if shift is not None and bool(shift.any()):
                if linear.bias is None:
                    zeros = nn.Parameter(torch.zeros_like(linear.weight[:, 0]), linear.weight.requires_grad)
                    put(cast("dict[str, Any]", linear._parameters), "bias", zeros, self.undo)
                self._later(linear.bias, partial(self._with_shift, linear, shift))
            if scale is not None:
                self._later(linear.weight, partial(torch.mul, scale))
        for parameter, make in ((weight, torch.ones_like), (bias, torch.zeros_like)):
            if parameter is not None:
                self._later(parameter, make)

    def _with_shift(self, linear: nn.Linear, shift: Tensor, bias: Tensor) -> Tensor:
        return bias + self.numbers(linear.weight).double() @ shift

    def _turn(self, parameter: Tensor, rotation: Rotation, dim: int, part: slice = slice(None)) -> None:
        """Every run of rotation.size channels along a dimension, v -> v Q."""

        def turned(value: Tensor) -> Tensor:
            lines = value.movedim(dim, -1).clone()
            lines[..., part] = rotation(lines[..., part].unflatten(-1, (-1, rotation.size))).flatten(-2)
            return lines.movedim(-1, dim)

        self._later(parameter, turned)

    def _later(self, parameter: Tensor, step: Callable[[Tensor], Tensor]) -> None:
        self._steps.setdefault(id(parameter), (parameter, []))[1].append(step)


def _is_rms(module: nn.Module) -> bool:
    """Whether a norm is known to take no mean away; others commute only with rotations that keep the mean."""
    return isinstance(module, nn.RMSNorm) or type(module).__name__ in RMS_NORMS
