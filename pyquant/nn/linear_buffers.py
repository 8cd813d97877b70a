"""What a QLinear holds, once, and how it is filled: codes in the layout of their device, scales, zero points, bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pyquant import ops
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.nn import state, weights
from pyquant.nn.shown import plain
from pyquant.nn.weight_view import Form
from pyquant.ops import plan, values
from pyquant.ops.load import has_kernel


class LinearBuffers(nn.Module):
    """The codes of a weight matrix, once, in the layout of their device; with scales, zero points and bias.

    `storage` is the packed buffer of an integer layer, or the canonical weight where there is none (weight-only and
    16-bit schemes, a layer that still lacks an input scale). `missing` names what is lacking.
    """

    in_features: int
    out_features: int
    scheme: QScheme
    activation: str
    clamp: tuple[float, float]
    dtype: torch.dtype
    state_slots: dict[str, state.Slot]
    missing: str | None  # the tensor without which the layer cannot run
    fused_activation: str | None = None  # the sibling whose work fuse_ moved into `activation`
    note: str = ""  # why quantize_ gave the layer another scheme than the config says
    share: str = ""  # which part of a layer this is, where each of several processes holds one
    _layouts: Any = None  # how the parts of inputs and results lie on these processes
    _experts: int = 0  # how many layers share rows with it, where it is an expert's: then their calls may be one
    # of a weight-only layer whose calls may go straight to the op: bits, group size, activation and its limits
    _how: tuple[int, int, str, float, float] | None = None
    packs: bool = True  # whether `storage` is to be what qlinear reads, where the scheme runs in integers
    # the weight where vmap makes a batch of the buffer alone, by its scales or bias: what functional_call restores
    _plain_weight: Tensor | None = None
    storage: Tensor
    # as they are read and saved; the attributes without the underscore show them
    weight_scale_: Tensor  # None in a 16-bit layer
    weight_zero_point_: Tensor | None
    bias_: Tensor | None  # float32
    input_scale_: Tensor | None
    input_zero_point_: Tensor | None
    output_scale_: Tensor | None
    output_zero_point_: Tensor | None

    def _describe(
        self,
        in_features: int,
        out_features: int,
        has_bias: bool,
        scheme: QScheme,
        activation: str | None,
        clamp: tuple[float, float] | None,
        dtype: torch.dtype,
    ) -> None:
        check_scheme(scheme)
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            arguments.whole(name, value, 0, 2**31 - 1)
        if dtype not in FLOATS:
            raise ArgumentError("dtype", dtype, "torch.float32, torch.float16 or torch.bfloat16")
        self.in_features, self.out_features, self.scheme, self.dtype = in_features, out_features, scheme, dtype
        self.activation, self.clamp = activation_and_limits(activation, clamp)
        self.state_slots = state.slots(scheme, out_features, in_features, has_bias)
        self._weight_name = scheme.weights.code_type.weight_name
        self._gives_codes = scheme.outputs is not None
        self.missing: str | None = None
        self._is_direct = False
        self._is_packed = False
        self._spec: tuple[int, ...] = ()
        self.register_buffer("storage", None, persistent=False)
        for name in state.NUMBERS:
            self.register_buffer(state.held(name), None)

    def _fill(self, tensors: Mapping[str, Tensor], *, in_place: bool = False, waits: bool = False) -> None:
        """Take checked tensors as the state: all of them, or (on an error) none.

        in_place  keep the memory of every tensor where it fits, as load_state_dict does everywhere: captured graphs and
                  weights that someone holds then see the new numbers.
        waits     whether the numbers stand in for those of a state_dict that is still to be loaded.
        """
        checked = {name: state.check(name, plain(tensor), self.state_slots[name]) for name, tensor in tensors.items()}
        weight = checked.get(self._weight_name)
        if weight is None:
            raise ArgumentError(self._weight_name, "None", self.state_slots[self._weight_name].text)
        for name, tensor in checked.items():
            if tensor.device != weight.device:
                raise ArgumentError(name, f"device {tensor.device}", f"device {weight.device}, where the codes are")
        missing = next((name for name in self.state_slots if name not in checked), None)
        storage, spec = weight.detach().contiguous(), self._linear_spec(weight.device)
        is_packed = self.packs and self.scheme.is_integer and missing is None
        if is_packed:
            codes = (storage, checked["weight_scale"], self.scheme.weights, self.in_features)
            storage = ops.pack_linear(*weights.packed_operands(*codes, spec), spec, *self._packed_numbers(checked))
        for name, tensor in checked.items():
            _refuse_derivatives(name, tensor)
        new = {name: tensor.detach().contiguous() for name, tensor in checked.items() if name in state.NUMBERS}
        new["storage"] = storage
        if in_place and (is_packed, spec) == (self._is_packed, self._spec):
            keys = {"storage": "storage"} | {name: state.held(name) for name in state.NUMBERS}
            new = {name: written(self._buffers[keys[name]], tensor) for name, tensor in new.items()}
        self._plain_weight = weight if values.is_batch(storage) and not values.is_batch(weight) else None
        self._buffers["storage"] = new["storage"]
        for name in state.NUMBERS:
            self._buffers[state.held(name)] = new.get(name)
        former = self._buffers.pop("bias_narrow", None)  # not held as None: torch.export counts such buffers wrongly
        if (narrow := self._narrowed(new.get("bias"))) is not None:
            self.register_buffer("bias_narrow", written(former, narrow) if in_place else narrow, persistent=False)
        self._spec, self.missing = spec, self._weight_name if waits else missing
        self._is_packed, self._is_direct = is_packed, is_packed and not waits and not self._gives_codes
        codes_of = None if self.scheme.is_float else self.scheme.weights
        self._how = None
        is_whole = self.scheme.is_weight_only and self.missing is None
        if codes_of is not None and is_whole and has_kernel("_weight_only", storage.device.type):
            self._how = (codes_of.bits, codes_of.group_size or 0, self.activation, *self.clamp)
        self._parameters["stand_in"] = state.stand_in(self.dtype, storage.device)
        self._form = Form(self.in_features, codes_of, spec if is_packed else (), getattr(self, "patches", None))

    def _narrowed(self, bias: Tensor | None) -> Tensor | None:
        """The bias in the type of 16-bit weights, as torch's Linear takes it on a GPU: not converted in every call."""
        if bias is None or not self.scheme.is_float or self.storage.device.type != "cuda":
            return None
        return bias.to(self.storage.dtype)

    @property
    def _waits(self) -> bool:
        """Whether to_empty made the numbers: they stand in until a state_dict is loaded."""
        return self.missing == self._weight_name

    def _linear_spec(self, device: torch.device) -> tuple[int, ...]:
        scheme, w = self.scheme, self.scheme.weights
        if scheme.inputs is None:
            return ()
        keeps_steps = w.two_level and device.type == "cuda"
        x_qmin, x_qmax = scheme.inputs.code_range
        out_qmin, out_qmax = self._output_range()
        spec = ops.LinearSpec(
            n=self.out_features,
            k=self.in_features,
            w_bits=w.bits if keeps_steps else w.product_type.bits,
            group_size=(w.group_size if keeps_steps else w.sum_size) or 0,
            input="dynamic" if scheme.inputs.dynamic else "static",
            x_qmin=x_qmin,
            x_qmax=x_qmax,
            x_symmetric=scheme.inputs.symmetric,
            activation=self.activation,
            clamp_min=self.clamp[0],
            clamp_max=self.clamp[1],
            has_bias="bias" in self.state_slots,
            codes_out=self._gives_codes,
            out_qmin=out_qmin,
            out_qmax=out_qmax,
            two_level=keeps_steps,
        )
        return replace(spec, layout=self._layout_on(device, spec)).to_ints()

    def _layout_on(self, device: torch.device, spec: ops.LinearSpec) -> str:
        """In which the device reads packed weights."""
        if self._experts and device.type == "cuda":
            return plan.bank_layout(spec, plan.Device.of(device), self._experts)
        return ops.layout_for(device, spec)

    def _packed_numbers(self, held: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        """What a packed buffer has beside the weights, in the order in which pack_linear takes it."""
        names = ("bias", "input_scale", "input_zero_point", "output_scale", "output_zero_point")
        return tuple(held.get(name) for name in names)

    def _output_range(self) -> tuple[int, int]:
        return (-127, 127) if self.scheme.outputs is None else self.scheme.outputs.code_range

    def _canonical(self) -> Tensor:
        """The weight as state_dict spells it: int8 [N, K], packed uint8 [N, ceil(K / 2)], or 16-bit floats."""
        if self._plain_weight is not None:
            return self._plain_weight
        return self._form.canonical(self.storage, self._buffers[state.held("weight_scale")])

    def _state(self) -> dict[str, Tensor]:
        held = {
            name: self._canonical() if name == self._weight_name else self._buffers[state.held(name)]
            for name in self.state_slots
        }
        return {name: tensor for name, tensor in held.items() if tensor is not None}


def written(old: Tensor | None, new: Tensor) -> Tensor:
    """The old tensor with the numbers of the new one, where it can hold them."""
    fits = old is not None and old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
    if old is None or not fits or old.is_inference():
        return new
    return old.copy_(new)


def check_scheme(scheme: object) -> None:
    if not isinstance(scheme, QScheme):
        raise ArgumentError("scheme", f"{type(scheme).__name__} {scheme!r}"[:120], "a QScheme such as W8A8Dynamic()")
    scheme.check_kernels()


def _refuse_derivatives(name: str, tensor: Tensor) -> None:
    """Raise UnsupportedError where torch.func differentiates by a tensor of the state: it would get zeros, as packed
    codes, scales and bias have no derivative here."""
    inner: Any = tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(inner):
        if torch._C._functorch.is_gradtrackingtensor(inner) and (inner.requires_grad or _has_tangent(inner)):
            raise UnsupportedError(
                f"a derivative by {name} of a quantised layer: its numbers are frozen, and the derivative would be "
                "zeros in silence; differentiate a model that simulates (prepare_qat_, insert_fake_quantize_)"
            )
        inner = torch._C._functorch.get_unwrapped(inner)


def _has_tangent(tensor: Tensor) -> bool:
    is_forward = torch.autograd.forward_ad._current_level >= 0
    return is_forward and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def activation_and_limits(name: str | None, clamp: tuple[float, float] | None) -> tuple[str, tuple[float, float]]:
    if name is None:
        name = "none" if clamp is None else "clamp"
    if name not in ops.ACTIVATIONS:
        raise ArgumentError("activation", repr(name), ", ".join(map(repr, (None, *ops.ACTIVATIONS))))
    if name != "clamp":
        if clamp is not None:
            raise ArgumentError("clamp", clamp, f"None with activation '{name}'")
        return name, (0.0, 0.0)
    try:
        low, high = (float(limit) for limit in (() if clamp is None else clamp))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ArgumentError("clamp", arguments.shown(clamp), "(low, high) with activation 'clamp'") from None
    if not low <= high:
        raise ArgumentError("clamp", clamp, "(low, high) with low <= high")
    return name, (low, high)
