"""The founding experiment's network: a format for each layer, every layer in every format, and what is made of them.

The weights are whole numbers from -7 to 7 times a power of two, which every format holds exactly, and the scales
between layers are powers of two: an integer layer has one right answer, bit for bit. There is no activation function
and no bias, as in the original experiment: a configuration is its products and the code between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from pyquant import ops
from pyquant.core.dtypes import dtype_name
from pyquant.core.presets import FP16, W4A4, W8A8
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn.chain import Quantize
from pyquant.nn.qlinear import QLinear

Config = tuple[str, ...]  # the format of each layer

SIZES: Final = (32768, 16384, 8192, 4096, 2048, 1024, 32768)
BATCH: Final = 2048
FLOAT: Final = "float"  # float16 or bfloat16, as the run has it; records say which
BITS: Final[Mapping[str, int]] = {FLOAT: 16, "int8": 8, "int4": 4}  # the float format first
_OTHER_NAMES: Final = {"s8": "int8", "s4": "int4", "f16": FLOAT, "fp16": FLOAT, "bf16": FLOAT}
CAPACITIES: Final = ("output", "input")

Value = Tensor | QTensor
LARGEST: Final = 7  # of weights and inputs: symmetric int4 has the codes -7 to 7
_SPREAD: Final = math.sqrt(LARGEST * (LARGEST + 1) / 3)  # standard deviation of whole numbers from -7 to 7
_INT = {"int8": W8A8(), "int4": W4A4()}
# Size of one code between layers, whose activations keep a standard deviation of 2 to 4.5.
_HIDDEN_SCALE: Final = {"int8": 0.25, "int4": 2.0}


def all_configs(layers: int = len(SIZES) - 1) -> list[Config]:
    """Every configuration, all float first."""
    return list(itertools.product(BITS, repeat=layers))


def parse_config(text: str, layers: int) -> Config:
    """'float,s8,int4' as a configuration. Raises ArgumentError for an unknown format or another number of layers."""
    names = [_OTHER_NAMES.get(name.strip(), name.strip()) for name in text.split(",")]
    for name in names:
        if name not in BITS:
            allowed = ", ".join([*BITS, *_OTHER_NAMES])
            raise ArgumentError("--nn-config", repr(name), f"a comma-separated list of: {allowed}")
    if len(names) != layers:
        raise ArgumentError("--nn-config", f"{len(names)} formats", f"one for each of the {layers} layers")
    return tuple(names)


def parse_sizes(text: str) -> tuple[int, ...]:
    """'32768,16384,1024' as sizes. Raises ArgumentError for less than two or one that no kernel is made for."""
    words = [word.strip() for word in text.split(",")]
    if len(words) < 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ArgumentError("--nn-size", repr(text), "at least two whole numbers > 0, comma-separated")
    return tuple(int(word) for word in words)


def scaled(sizes: Iterable[int], divisor: int) -> tuple[int, ...]:
    """Sizes over a divisor. Raises ArgumentError where it does not divide one of them."""
    dimensions = tuple(sizes)
    if divisor < 1 or any(size % divisor for size in dimensions):
        raise ArgumentError(
            "--scale", divisor, f"a whole number >= 1 that divides every size: {', '.join(map(str, dimensions))}"
        )
    return tuple(size // divisor for size in dimensions)


def capacity(sizes: Sequence[int], config: Config, of: str = "output") -> int:
    """Representational capacity in bits: the sum over layers of output (or input) dimension times the format's bits.

    sizes   of the activations, one more than there are layers.
    of      'output' or 'input': both give the same set of values, but another order of the configurations.
    """
    if of not in CAPACITIES:
        raise ArgumentError("capacity", of, ", ".join(CAPACITIES))
    dimensions = sizes[1:] if of == "output" else sizes[:-1]
    return sum(n * BITS[name] for n, name in zip(dimensions, config, strict=True))


@dataclass(frozen=True)
class Joint:
    """One layer in a configuration: the facts that determine its kernel.

    layer       index from 0.
    own, after  its format and the next layer's, whose codes it gives (FLOAT at the end: floats).
    from_float  it is given floats, which an integer layer has to quantise itself; always where its own format is FLOAT.
    """

    layer: int
    own: str
    after: str
    from_float: bool

    @property
    def name(self) -> str:
        """As reports show it."""
        return f"layer {self.layer + 1}: {'float' if self.from_float else self.own} -> {self.own} -> {self.after}"


def joints(config: Config) -> list[Joint]:
    """The layers of a configuration with their neighbours; the input of the network is floats."""
    befores, afters = (FLOAT, *config[:-1]), (*config[1:], FLOAT)
    return [
        Joint(i, own, after, FLOAT in (before, own))
        for i, (before, own, after) in enumerate(zip(befores, config, afters, strict=True))
    ]


def all_joints(layers: int, *, from_float: bool) -> list[Joint]:
    """Every layer between every two formats; from_float: also those whose integer layer gets floats."""
    possible: dict[Joint, None] = {}
    for i in range(layers):
        for own, after in itertools.product(BITS, BITS if i + 1 < layers else (FLOAT,)):
            if i or not from_float:
                possible[Joint(i, own, after, own == FLOAT)] = None
            if from_float:
                possible[Joint(i, own, after, True)] = None
    return list(possible)


def exponents(sizes: tuple[int, ...]) -> list[int]:
    """The exponent of each layer's weights: activations keep a standard deviation between 2 and 4.5."""
    powers, spread = [], _SPREAD
    for k in sizes[:-1]:
        grown = spread * math.sqrt(k) * _SPREAD
        powers.append(round(math.log2(grown / 3)))
        spread = grown * 2.0 ** -powers[-1]
    return powers


class MlpNet:
    """Layers for every pair of formats; layers of one format share their weights' numbers, not their kernels.

    sizes         of the activations.
    float_type    of floating-point layers: float16 or bfloat16.
    weights       codes int8 [N, K], one a layer; exponents: the weights are codes x 2^-exponent.
    """

    def __init__(
        self, sizes: tuple[int, ...], batch: int, device: torch.device | str, float_type: torch.dtype, seed: int
    ):
        self.sizes, self.batch, self.float_type = sizes, batch, float_type
        self.device = torch.device(device)
        generator = torch.Generator(self.device).manual_seed(seed)
        self.weights = [self._whole_numbers((n, k), generator) for k, n in itertools.pairwise(sizes)]
        self.exponents = exponents(sizes)
        self.x = self._whole_numbers((batch, sizes[0]), generator).to(float_type)
        self.layers = len(self.weights)
        self._plain = {(i, name): self._layer(i, name) for i in range(self.layers) for name in BITS}
        self._linked: dict[tuple[int, str, str], QLinear] = {}
        self.ready = self._ready_inputs()

    def layer(self, joint: Joint) -> QLinear:
        """The layer of a joint: the product and, in the same kernel, the codes of the next layer."""
        if joint.own == FLOAT or joint.after == FLOAT:
            return self._plain[joint.layer, joint.own]
        key = (joint.layer, joint.own, joint.after)
        if key not in self._linked:  # its output scale is the very tensor that the next layer knows as its input's
            reader = self._plain[joint.layer + 1, joint.after]
            self._linked[key] = self._plain[key[:2]].with_outputs(reader.scheme.inputs, reader.input_scale)
        return self._linked[key]

    def input_scheme(self, name: str) -> TensorScheme | None:
        """How the inputs of a format's layers are quantised; None: not."""
        return None if name == FLOAT else _INT[name].inputs

    def forward(self, config: Config) -> Callable[[], Value]:
        """The whole network from floats to floats: quantising and converting between formats included."""
        return partial(_chain, [self.layer(joint) for joint in joints(config)], self.x)

    def kernels(self, config: Config) -> Callable[[], None]:
        """The products alone: every layer's op on inputs that lie ready in its own format."""
        return partial(_each, [self.product(joint) for joint in joints(config)])

    def product(self, joint: Joint) -> Callable[[], Tensor]:
        """The op of one layer on its ready input, without the module round it. -> codes or floats."""
        layer, x = self.layer(joint), self.ready[joint.layer, joint.own]
        if isinstance(x, QTensor):
            out = self.float_type if layer.scheme.outputs is None else self._codes_dtype(joint)
            return partial(torch.ops.pyquant.qlinear.default, x.data, layer.storage, None, layer._spec, out)
        fused = (layer.activation, *layer.clamp)
        return partial(torch.ops.pyquant.float_linear.default, x, layer.storage, None, None, *fused, x.dtype)

    def _codes_dtype(self, joint: Joint) -> torch.dtype | None:
        """uint8 where the next layer's int4 codes lie two a byte; None: a byte each."""
        packed = joint.after == "int4" and ops.packs_int4(self.device, self.sizes[joint.layer + 1])
        return torch.uint8 if packed else None

    def one(self, joint: Joint) -> Callable[[], Value]:
        """One layer between its neighbours, called as in the whole network."""
        return partial(self.layer(joint), self.ready[joint.layer, FLOAT if joint.from_float else joint.own])

    def _whole_numbers(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        numbers = torch.empty(shape, dtype=torch.int8, device=self.device)
        return numbers.random_(-LARGEST, LARGEST + 1, generator=generator)

    def _layer(self, i: int, name: str) -> QLinear:
        codes, step = self.weights[i], 2.0 ** -self.exponents[i]
        if name == FLOAT:
            scheme = FP16(dtype_name(self.float_type))
            return QLinear.from_codes(codes.to(self.float_type) * step, None, scheme=scheme, dtype=self.float_type)
        scale = torch.full((codes.shape[0],), step, device=self.device)
        # The network's input is whole numbers up to 7: codes of scale 1, the same in every format.
        input_scale = torch.tensor(_HIDDEN_SCALE[name] if i else 1.0, device=self.device)
        return QLinear.from_codes(codes, scale, scheme=_INT[name], input_scale=input_scale, dtype=self.float_type)

    def _ready_inputs(self) -> dict[tuple[int, str], Value]:
        """Inputs of each layer in each format: the activations of the float network, quantised where need be."""
        ready: dict[tuple[int, str], Value] = {}
        x = self.x
        with torch.inference_mode():
            for i in range(self.layers):
                ready[i, FLOAT] = x
                for name in _INT:
                    reader = self._plain[i, name]
                    codes = Quantize(reader.input_scale, scheme=reader.scheme.inputs)(x)
                    ready[i, name] = codes._replace(scale=reader.input_scale, zero_point=None)
                x = self._plain[i, FLOAT](x)
        return ready


def _chain(layers: list[QLinear], x: Value) -> Value:
    for layer in layers:
        x = layer(x)
    return x


def _each(products: list[Callable[[], Tensor]]) -> None:
    for product in products:
        product()
