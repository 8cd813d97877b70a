"""The state of a QLinear from outside: its attributes, and every way it comes in, goes out, moves and is cast."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from pyquant.core.dtypes import FLOATS, describe
from pyquant.errors import ArgumentError, PyquantError
from pyquant.nn import foreign_changes, foreign_saves, state
from pyquant.nn.linear_buffers import LinearBuffers
from pyquant.nn.shown import Shown, number, plain, show
from pyquant.nn.weight_view import QWeight, weight_of
from pyquant.ops import values

Self = TypeVar("Self", bound="LinearState")
_INPUT_CODES: Final = "input_codes"  # in the metadata of a state_dict
_OF_CODES: Final = ("weight_scale", "weight_zero_point")  # what codes mean nothing without


class LinearState(LinearBuffers):
    """What a layer shows of what it holds, and takes: attributes, state_dict, moves and casts."""

    weight_scale: Tensor = number("weight_scale")  # None in a 16-bit layer
    weight_zero_point: Tensor | None = number("weight_zero_point")
    input_scale: Tensor | None = number("input_scale")
    input_zero_point: Tensor | None = number("input_zero_point")
    output_scale: Tensor | None = number("output_scale")
    output_zero_point: Tensor | None = number("output_zero_point")

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
        numbers = self.weight_scale_, self.weight_zero_point_
        shown = weight_of(storage, *numbers, form, self.out_features, self.dtype)
        if isinstance(shown, QWeight):
            shown.home = weakref.ref(self)
        return shown

    def _real(self, dtype: torch.dtype) -> Tensor:
        """The weights in the shape of the float layer's."""
        return self._form.real(self.storage, self.weight_scale_, self.weight_zero_point_, dtype)

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

        Assignment takes float32, or `dtype`; what is written in place into what was shown, the layer takes as well.
        """
        foreign_changes.refuse_look()
        held = self._buffers[state.held("bias")]
        if (lent := self._lent_by_caller("bias")) is not None:
            return cast(Tensor, lent)
        is_own = held is None or held.dtype == self.dtype
        if held is None or (is_own and self.scheme.is_float and "bias_narrow" not in self._buffers):
            return held
        return show(self, "bias", held if is_own else held.to(self.dtype), held)

    @property
    def parametrizations(self) -> Any:
        """None of torch.nn.utils.parametrize: the weight is not computed from parameters."""
        foreign_changes.refuse_parametrising()
        raise AttributeError("parametrizations")

    def _bias_to_hold(self, value: object) -> object:
        """float32 of a bias in the type that the layer shows. What was shown and comes back (functional_call does so)
        is what was held, without the rounding."""
        if not isinstance(value, Tensor) or value.dtype != self.dtype:
            return plain(value)
        held = value.held if isinstance(value, Shown) and value.slot == "bias" else None
        numbers = plain(value)
        is_unchanged = held is not None and (value.is_meta or torch.equal(held.to(numbers), numbers))
        return held if is_unchanged else numbers.to(torch.float32)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in state.NUMBERS:
            if name == "bias":
                value = self._bias_to_hold(value)
            value = plain(value)
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
        told = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if told is not None and (codes := self._input_codes()) is not None:
            told[_INPUT_CODES] = codes
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
        told = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        for hook in self._load_state_dict_pre_hooks.values():
            hook(*told)
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
        codes, theirs = self._input_codes(), local_metadata.get(_INPUT_CODES)
        if not wrong and "input_scale" in taken and codes is not None and theirs is not None and codes != [*theirs]:
            wrong = f"{prefix}input_scale: of codes from {theirs[0]} to {theirs[1]}; this layer's inputs have "
            wrong += f"{codes[0]} to {codes[1]}"
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

    def _input_codes(self) -> list[int] | None:
        """The ends of what the input scale is a scale of; None where there is no such scale."""
        return [*self.scheme.inputs.code_range] if self.scheme.inputs is not None and self.scheme.is_static else None

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        storage = self.storage
        probe = fn(torch.empty(0, dtype=self.dtype, device=storage.device))
        if storage.is_meta and not probe.is_meta:  # to_empty: as the constructor makes it, until a state is loaded
            self._fill(state.fresh(self.state_slots, probe.device), waits=True)
        elif probe.device == storage.device or probe.is_meta:  # its layout stays, for functional_call
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


def traced(layer: nn.Module, x: Proxy, *args: Any, **kwargs: Any) -> Any:
    """The call of a layer on a value of torch.fx: one node, whatever the tracer's own idea of leaves."""
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), (x, *args), kwargs)
