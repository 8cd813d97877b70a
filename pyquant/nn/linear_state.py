"""The state of a QLinear: which tensors it holds, and every way they come in, go out, move and are cast."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from pyquant import ops
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS, describe
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, PyquantError, UnsupportedError
from pyquant.nn import foreign_changes, foreign_saves, state, weights
from pyquant.nn.weight_view import Form, QWeight, weight_of
from pyquant.ops import plan, values
from pyquant.ops.load import has_kernel

Self = TypeVar("Self", bound="LinearState")
_OF_CODES: Final = ("weight_scale", "weight_zero_point")  # what codes mean nothing without


def _number(name: str) -> Any:
    """A tensor of the state as an attribute. Its buffer has another name (state.held), so that torch.func's
    functional_call, which puts tensors into buffers of their name, assigns it instead: the packed weight follows."""
    key = state.held(name)
    return property(lambda layer: layer._buffers[key])


class LinearState(nn.Module):
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
    weight_scale: Tensor = _number("weight_scale")  # None in a 16-bit layer
    weight_zero_point: Tensor | None = _number("weight_zero_point")
    bias_: Tensor | None  # float32, as it is added and saved; `bias` shows it
    input_scale: Tensor | None = _number("input_scale")
    input_zero_point: Tensor | None = _number("input_zero_point")
    output_scale: Tensor | None = _number("output_scale")
    output_zero_point: Tensor | None = _number("output_zero_point")

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
        checked = {name: state.check(name, tensor, self.state_slots[name]) for name, tensor in tensors.items()}
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

    @property
    def weight(self) -> Tensor:
        """The weight as the float layer would show it: `dtype`, shape and device; dequantised when computed with.

        Looking costs nothing; arithmetic, slices and .numpy() see scale * (code - zero_point), computed for each use.
        Assignment takes codes: a tensor as state_dict spells it (`codes`, or `weight_packed`), or the weight of a
        layer with the same scheme, whose scales come along.
        """
        foreign_changes.refuse_look()
        if (lent := self._lent_by_caller("weight")) is not None:
            return cast(Tensor, lent)
        storage, form = cast(Tensor, self._buffers["storage"]), self._form
        if self._plain_weight is not None:
            storage, form = self._plain_weight, replace(form, spec=())
        numbers = self.weight_scale, self.weight_zero_point
        shown = weight_of(storage, *numbers, form, self.out_features, self.dtype)
        if isinstance(shown, QWeight):
            shown.home = weakref.ref(self)
        return shown

    def _real(self, dtype: torch.dtype) -> Tensor:
        """The weights in the shape of the float layer's."""
        return self._form.real(self.storage, self.weight_scale, self.weight_zero_point, dtype)

    @property
    def codes(self) -> Tensor:
        """The weight codes, int8 [N, K] (16-bit schemes: the weights). Unpacked at each use."""
        return self._form.codes(self.storage, self._buffers[state.held("weight_scale")])

    @property
    def weight_packed(self) -> Tensor:
        """4-bit codes two per byte, uint8 [N, ceil(K / 2)], the even column in the low nibble.

        Raises AttributeError where the weights have more than 4 bits.
        """
        if self._weight_name != "weight_packed":
            raise AttributeError(f"weight_packed is for 4-bit weights; this layer's scheme is {self.scheme}")
        lent = self._lent_by_caller("weight_packed")
        return self._canonical() if lent is None else cast(Tensor, lent)

    def _assign_weight(self, name: str, value: object) -> None:
        if isinstance(value, QWeight):
            same = value.form.scheme == self._form.scheme and value.form.patches == self._form.patches
            if not same:
                raise ArgumentError(name, f"the weight of a layer with codes {value.form.scheme}", str(self.scheme))
            new: dict[str, Tensor | None] = {self._weight_name: value.canonical}
            if value.home is None or value.home() is not self:  # its own codes come back: scales are put back as such
                new |= {"weight_scale": value.scale_, "weight_zero_point": value.zero_point_}
        elif name != self._weight_name or not isinstance(value, Tensor):
            got = describe(value)
            raise ArgumentError(name, got, f"{self._weight_name}, {self.state_slots[self._weight_name].text}")
        else:
            new = {name: value}
        held = self._state()
        given = {n: t for n, t in new.items() if t is not None}
        if not all(n in held and _are_equal(held[n], t) for n, t in given.items()):
            self._fill(held | given)

    def _scale_weight(self, factor: float) -> bool:
        """Multiply the weight by a power of two, in place: scales exactly, 16-bit floats as floats are. False, and
        nothing done, where a scale would become subnormal or infinite."""
        held = self._state()
        is_coded = self._form.scheme is not None
        name = "weight_scale" if is_coded else self._weight_name
        new = held[name] * factor
        if is_coded and not new.is_meta and not torch.equal(new / factor, held[name]):
            return False
        self._fill(held | {name: new}, in_place=True)
        return True

    @property
    def bias(self) -> Tensor | None:
        """The bias as the float layer would show it, in `dtype`; it is held, added and saved in float32.

        In a 16-bit layer each access makes a copy. Assignment takes float32, or `dtype`.
        """
        foreign_changes.refuse_look()
        held = self._buffers[state.held("bias")]
        if (lent := self._lent_by_caller("bias")) is not None:
            return cast(Tensor, lent)
        if held is None or held.dtype == self.dtype:
            return held
        shown: Any = held.to(self.dtype)
        if not torch.compiler.is_compiling():
            shown.held = held
        return cast(Tensor, shown)

    @property
    def parametrizations(self) -> Any:
        """None of torch.nn.utils.parametrize: the weight is not computed from parameters."""
        foreign_changes.refuse_parametrising()
        raise AttributeError("parametrizations")

    def _bias_to_hold(self, value: object) -> object:
        """float32 of a bias in the type that the layer shows. What was shown and comes back (functional_call does so)
        is what was held, without the rounding."""
        if not isinstance(value, Tensor) or value.dtype != self.dtype:
            return value
        held: Tensor | None = getattr(value, "held", None)
        is_unchanged = held is not None and (value.is_meta or torch.equal(held.to(value), value))
        return held if is_unchanged else value.to(torch.float32)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in state.NUMBERS:
            if name == "bias":
                value = self._bias_to_hold(value)
            if name not in self.state_slots and value is not None:
                raise ArgumentError(name, "a tensor", f"None with scheme {self.scheme}")
            changed = {n: t for n, t in self._state().items() if n != name}
            self._fill(changed if value is None else changed | {name: value})
        elif name in ("weight", "weight_packed"):
            self._assign_weight(name, value)
        else:
            if name == "_old_forward":
                foreign_changes.before_hook(self)
            super().__setattr__(name, value)
            return
        lent = self.__dict__.setdefault("_lent", {})
        if lent.pop(name, None) is None and _is_functional_call(2):
            lent[name] = value

    def _lent_by_caller(self, name: str) -> Any:
        """What functional_call put here, where it is the one that asks: it writes that into the dict of its caller."""
        lent = self.__dict__.get("_lent")
        return lent.get(name) if lent and _is_functional_call(3) else None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if foreign_saves.are_left_out():
            return
        if not self.scheme.is_float:
            foreign_saves.refuse(prefix)
        for name, tensor in self._state().items():
            destination[prefix + name] = tensor if keep_vars else foreign_saves.as_codes(tensor.detach())

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        here = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        if strict:
            missing_keys.extend(prefix + name for name in self.state_slots if name not in here)
            unexpected_keys.extend(prefix + name for name in here if name not in self.state_slots)
        taken = {name: here[name] for name in self.state_slots if name in here}
        assign, device = bool(local_metadata.get("assign_to_params_buffers", False)), self.storage.device
        # With strict=False the layer would keep its own codes, or read new ones by its own scales.
        own, place = self._weight_name, prefix or type(self).__name__
        other = "weight" if own == "weight_packed" else "weight_packed"
        wrong = ""
        if own not in taken and isinstance(here.get(other), Tensor):
            got = f"{prefix}{other}: {describe(here[other])} for a layer of scheme {self.scheme}"
            wrong = f"{got}, which takes {own} {self.state_slots[own].text}; load a float state before quantize_"
        elif own in taken and (lacking := [n for n in _OF_CODES if n in self.state_slots and n not in here]):
            wrong = f"{prefix}{own}: codes without their {prefix}{lacking[0]}"
        elif taken and device.type == "meta" and not assign:
            wrong = f"{place}: is on the meta device; use load_state_dict(..., assign=True)"
        if wrong or not taken:
            error_msgs.extend([wrong] if wrong else [])
            return
        # Nothing is asked of the layer's own numbers where all come in: torch.distributed.checkpoint has written into
        # some of them already, those that its state_dict does not copy.
        current = {} if self._waits or len(taken) == len(self.state_slots) else self._state()
        try:
            for name, value in taken.items():
                state.check(name, value, self.state_slots[name])
            moved = {
                name: value.detach() if assign else value.detach().to(device, copy=True)
                for name, value in taken.items()
            }
            unchanged = {name: tensor for name, tensor in current.items() if not (assign and tensor.is_meta)}
            self._fill(unchanged | moved, in_place=not assign)
        except (PyquantError, KeyError) as error:
            error_msgs.append(f"{place}: {error}")

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        storage = self.storage
        probe = fn(torch.empty(0, dtype=self.dtype, device=storage.device))
        if storage.is_meta and not probe.is_meta:  # to_empty: as the constructor makes it, until a state is loaded
            self._fill(state.fresh(self.state_slots, probe.device), waits=True)
        elif probe.device == storage.device:
            for name, tensor in self._buffers.items():
                if tensor is not None:
                    self._buffers[name] = state.same_type(fn, tensor)
        else:
            moved = {name: state.same_type(fn, tensor) for name, tensor in self._state().items()}
            self._fill(moved, waits=self._waits)
        if probe.dtype in FLOATS:
            self.dtype = probe.dtype
        self._parameters["stand_in"] = state.stand_in(self.dtype, probe.device)
        return self


def _is_functional_call(depth: int) -> bool:
    """Whether the function `depth` frames up exchanges tensors for torch.func.functional_call."""
    return not torch.compiler.is_compiling() and sys._getframe(depth).f_code.co_name == "swap_tensor"


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are known to hold the same numbers; those of a batch of vmap are not."""
    if one.shape != other.shape or values.is_batch(one) or values.is_batch(other):
        return False
    return torch.equal(one, other)


def written(old: Tensor | None, new: Tensor) -> Tensor:
    """The old tensor with the numbers of the new one, where it can hold them."""
    fits = old is not None and old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
    if old is None or not fits or old.is_inference():
        return new
    return old.copy_(new)


def traced(layer: nn.Module, x: Proxy, *args: Any) -> Any:
    """The call of a layer on a value of torch.fx: one node, whatever the tracer's own idea of leaves."""
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), (x, *args), {})


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
