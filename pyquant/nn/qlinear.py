"""QLinear: a Linear whose weights are held as codes and whose product runs in integers (or 16-bit floats)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from pyquant import ops
from pyquant.core.presets import W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, PyquantError, UnsupportedError
from pyquant.nn import kernel_info as info
from pyquant.nn import reference, state, straight_through, weights
from pyquant.ops.check import describe
from pyquant.ops.translate import reraise

_qlinear = torch.ops.pyquant.qlinear.default
_weight_only = torch.ops.pyquant.weight_only_linear.default
_float = torch.ops.pyquant.float_linear.default

# What an op raises for wrong operands; translated into pyquant's errors after the fact, so that a right call pays nothing.
_OP_ERRORS: Final = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError)


class QLinear(nn.Module):
    """y = activation(x @ W.T + bias) + residual, with W quantised as `scheme` says.

    in_features, out_features, bias, device   as in torch.nn.Linear.
    scheme      QScheme; decides what is stored and how the product runs.
    activation  None, 'relu', 'gelu', 'gelu_tanh', 'silu', or 'clamp' with limits in `clamp`.
    clamp       (low, high) of activation 'clamp'.
    dtype       result type where the input is codes; a float input gives its own type. Follows .half(), .bfloat16().

    A layer made this way holds zero weights and is meant to be filled by load_state_dict; use from_float or from_codes
    otherwise. Its state: `weight` (int8 [N, K]) or `weight_packed` (uint8 [N, ceil(K / 2)], 4 bits), `weight_scale`,
    and as the scheme needs `weight_zero_point`, `bias`, `input_scale`, `input_zero_point`, `output_scale`,
    `output_zero_point`. Scales and bias are float32, zero points int32, whatever the model is cast to. In memory the
    codes are held once, in `storage`, in the layout of the device; scales and bias are copied into it, so change them
    by assignment (`layer.bias = t`) or load_state_dict, not in place.

    Raises SchemeError, ArgumentError. Source: docs/numerics.md 2-5, 8.

    Example:
        >>> layer = QLinear.from_float(nn.Linear(64, 32), W8A8Dynamic())
        >>> layer(torch.zeros(2, 64)).shape
        torch.Size([2, 32])
    """

    in_features: int
    out_features: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scheme: QScheme | None = None,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        clamp: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        self._describe(in_features, out_features, bool(bias), scheme or W8A8Dynamic(), activation, clamp, dtype)
        where = state.device_of(device)
        fresh: dict[str, Tensor] = {}
        for name, slot in self.state_slots.items():
            if name in ("weight", "weight_packed", "bias", "weight_zero_point"):
                fresh[name] = torch.zeros(slot.shape, dtype=slot.dtype, device=where)
            elif name == "weight_scale":
                fresh[name] = torch.ones(slot.shape, dtype=slot.dtype, device=where)
        self._fill(fresh)

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        scheme: QScheme,
        *,
        input_scale: float | Tensor | None = None,
        input_zero_point: int | Tensor | None = None,
        output_scale: float | Tensor | None = None,
        output_zero_point: int | Tensor | None = None,
        activation: str | None = None,
        clamp: tuple[float, float] | None = None,
    ) -> QLinear:
        """A QLinear with the weights of a float Linear, max-calibrated per channel or group.

        linear        nn.Linear, float32, float16 or bfloat16, finite; not changed.
        input_scale   real size of one input code (static schemes): number or one-element tensor, finite and > 0.
        input_zero_point, output_zero_point   code of real 0 (affine static schemes).
        output_scale  real size of one output code (schemes with outputs).
        Raises SchemeError for a group size that does not divide in_features, ArgumentError naming what is wrong.

        Example:
            >>> from pyquant.core.presets import W8A8
            >>> QLinear.from_float(nn.Linear(8, 4), W8A8(), input_scale=0.05).input_scale.item() > 0
            True
        """
        if not isinstance(linear, nn.Linear):
            raise ArgumentError("linear", type(linear).__name__, "a torch.nn.Linear")
        _check_scheme(scheme)
        weight = linear.weight.detach()
        if scheme.is_float:
            if weight.dtype not in weights.FLOAT_TYPES:
                raise ArgumentError("weight", str(weight.dtype).removeprefix("torch."), "float32, float16 or bfloat16")
            codes = weight.to(getattr(torch, scheme.float_dtype or ""), memory_format=torch.contiguous_format, copy=True)
            scale = zero_point = None
        else:
            codes, scale, zero_point = weights.quantise_weight(weight, scheme.weights)
        bias = None if linear.bias is None else linear.bias.detach().to(torch.float32, copy=True)
        return cls.from_codes(
            codes, scale, scheme=scheme, bias=bias, weight_zero_point=zero_point, input_scale=input_scale,
            input_zero_point=input_zero_point, output_scale=output_scale, output_zero_point=output_zero_point,
            activation=activation, clamp=clamp, dtype=weight.dtype,
        )  # fmt: skip

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        weight_scale: Tensor | None,
        *,
        scheme: QScheme,
        bias: Tensor | None = None,
        weight_zero_point: Tensor | None = None,
        input_scale: float | Tensor | None = None,
        input_zero_point: int | Tensor | None = None,
        output_scale: float | Tensor | None = None,
        output_zero_point: int | Tensor | None = None,
        activation: str | None = None,
        clamp: tuple[float, float] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> QLinear:
        """A QLinear from ready codes; lives on the device of `codes`.

        codes         int8 [N, K] within the scheme's code range (16-bit schemes: the weights, in float_dtype).
        weight_scale  float32 [N] or [N, K / group_size], finite and > 0 (16-bit schemes: None).
        Others as in from_float; bias float32 [N].
        Raises ArgumentError, NonFiniteError or SchemeError naming what is wrong.

        Example:
            >>> QLinear.from_codes(torch.ones(2, 3, dtype=torch.int8), torch.ones(2), scheme=W8A8Dynamic()).out_features
            2
        """
        _check_scheme(scheme)
        if not isinstance(codes, Tensor) or codes.dim() != 2:
            got = f"{type(codes).__name__} {list(codes.shape) if isinstance(codes, Tensor) else repr(codes)}"
            raise ArgumentError("codes", got[:120], "a tensor [out_features, in_features]")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._describe(codes.shape[1], codes.shape[0], bias is not None, scheme, activation, clamp, dtype)
        plan = layer.state_slots
        given: dict[str, Tensor | None] = {"weight_scale": weight_scale, "weight_zero_point": weight_zero_point, "bias": bias}
        for name, value in (
            ("input_scale", input_scale), ("input_zero_point", input_zero_point),
            ("output_scale", output_scale), ("output_zero_point", output_zero_point),
        ):  # fmt: skip
            given[name] = state.scalar(name, value, plan.get(name), codes.device)
        for name, value in given.items():
            if value is None and name in plan and name != "input_scale":
                raise ArgumentError(name, "None", f"{plan[name].text} with scheme {scheme}")
            if value is not None and name not in plan:
                raise ArgumentError(name, "a tensor", f"None with scheme {scheme}")
        if given["input_scale"] is None and "input_scale" in plan:
            raise ArgumentError("input_scale", "None", f"a number > 0: scheme {scheme} has a static input range")
        limits = None if scheme.is_float else scheme.weights.code_range
        dtype_of_codes = plan["weight"].dtype if scheme.is_float else torch.int8
        state.check("codes", codes, state.Slot(dtype_of_codes, (codes.shape[0], codes.shape[1]), limits))
        weight = ops.pack_int4(codes) if scheme.weights.bits == 4 else codes
        layer._fill({layer._weight_name: weight} | {n: v for n, v in given.items() if v is not None})
        return layer

    def to_float(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A torch.nn.Linear with the dequantised weights and the bias; the activation is not part of it.

        dtype  None: the layer's own `dtype`. In float32 the weights are exactly scale * (code - zero_point).

        Example:
            >>> QLinear.from_float(nn.Linear(8, 4), W8A8Dynamic()).to_float().weight.shape
            torch.Size([4, 8])
        """
        dtype = dtype or self.dtype
        real = self.dequantised_weight()
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        linear.weight = nn.Parameter(real.to(dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.to(dtype, copy=True))
        return linear.train(self.training)

    def dequantised_weight(self) -> Tensor:
        """float32 [N, K]: the real weights that the codes stand for."""
        if self.scheme.is_float:
            return self.weight.to(torch.float32)
        return weights.dequantise_weight(self.weight, self.weight_scale, self.weight_zero_point, self.scheme.weights)

    # ---- running

    def forward(self, x: Tensor | QTensor, residual: Tensor | None = None) -> Any:
        """The layer.

        x         float32, float16 or bfloat16 [..., in_features], or a QTensor of codes. A static layer takes codes of
                  its own input scale; a dynamic layer any per-token or per-tensor codes (exact, but its weights are
                  laid out anew for each such call).
        residual  float [..., out_features], added after the activation; or None.
        ->        [..., out_features] in x's type (`dtype` for codes), or a QTensor where the scheme has outputs. A row
                  of x that holds NaN or infinity gives a row of NaN with dynamic inputs.
        Gradients flow to float x (straight through the rounding; where a static range clips, none) and to residual.
        Raises ArgumentError, UnsupportedError.
        """
        if self._is_direct:
            try:
                if not x.requires_grad and residual is None:  # type: ignore[union-attr]
                    return _qlinear(x, self._buffers["storage"], None, self._spec)
            except _OP_ERRORS as error:
                if isinstance(x, Tensor):
                    self._explain(error, x)
        return self._forward_general(x, residual)

    def _forward_general(self, x: Tensor | QTensor, residual: Tensor | None) -> Any:
        if self.missing:
            raise ArgumentError(
                self.missing, "None", f"a value: scheme {self.scheme} needs it; give it to from_float or quantize_, or "
                "load a state_dict that has it"
            )  # fmt: skip
        if not isinstance(x, (Tensor, QTensor)):
            raise ArgumentError("x", f"{type(x).__name__} {x!r}"[:120], "a Tensor or a QTensor")
        if residual is not None and not isinstance(residual, Tensor):
            raise ArgumentError("residual", type(residual).__name__, "a Tensor or None")
        try:
            if not self.scheme.is_integer:
                return self._forward_float(x, residual)
            if isinstance(x, QTensor):
                y = self._forward_codes(x, residual)
            elif torch.is_grad_enabled() and _needs_grad(x, residual) and not self._gives_codes:
                y = straight_through.apply(self, x, residual)
            else:
                y = _qlinear(x, self._buffers["storage"], residual, self._spec)
        except PyquantError:
            raise
        except _OP_ERRORS as error:
            self._explain(error, x)
        return QTensor(y, self.output_scale, self.output_zero_point) if self._gives_codes else y

    def _forward_float(self, x: Tensor | QTensor, residual: Tensor | None) -> Tensor:
        if isinstance(x, QTensor):
            raise ArgumentError("x", "a QTensor", f"a float tensor: scheme {self.scheme} does not take codes")
        self._check_operand(x, weights.FLOAT_TYPES)
        storage, fused = self._buffers["storage"], (self.activation, *self.clamp)
        if self.scheme.is_float:
            return _float(x.to(storage.dtype), storage, self.bias, residual, *fused, x.dtype)
        w = self.scheme.weights
        return _weight_only(
            x, storage, self.weight_scale, self.weight_zero_point, self.bias, residual, w.bits, w.group_size or 0, *fused
        )

    def _forward_codes(self, x: QTensor, residual: Tensor | None) -> Tensor:
        self._check_codes(x)
        data, zero_point = _signed(x)
        out_dtype = None if self._gives_codes or self.dtype == torch.float32 else self.dtype
        if self.scheme.is_static:
            self._check_linked(x, zero_point)
            return _qlinear(data, self._buffers["storage"], residual, self._spec, out_dtype)
        w, limits = self.scheme.weights, self._output_range()
        four_bit_inputs = self.scheme.inputs is not None and self.scheme.inputs.bits == 4
        gemm = ops.gemm_s8s8 if w.bits == 8 else ops.gemm_s4s4 if four_bit_inputs else ops.gemm_s8s4
        return gemm(
            data, self._canonical(), self.weight_scale, x.scale, zero_point, self.bias, residual, self.output_scale,
            self.output_zero_point, w.group_size or 0, self.activation, *self.clamp, *limits,
            torch.int8 if self._gives_codes else self.dtype,
        )  # fmt: skip

    def _check_operand(self, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        if x.dtype not in dtypes or x.layout != torch.strided or x.dim() < 1 or x.shape[-1] != self.in_features:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ArgumentError("x", describe(x), f"{names} [..., {self.in_features}], dense")
        self._check_device(x)

    def _check_device(self, x: Tensor) -> None:
        device = self._buffers["storage"].device
        if x.device != device:
            raise ArgumentError("x", f"device {x.device}", f"device {device}, where the layer is")

    def _explain(self, error: Exception, x: Tensor | QTensor) -> NoReturn:
        """What an op said, in the words of the layer: its packed buffer is no argument that a caller knows."""
        if isinstance(x, Tensor):
            self._check_device(x)
        reraise(error)

    def _check_codes(self, x: QTensor) -> None:
        for name, tensor, dtype in (("data", x.data, None), ("scale", x.scale, torch.float32), ("zero_point", x.zero_point, torch.int32)):
            if tensor is None and name == "zero_point":
                continue
            if not isinstance(tensor, Tensor) or dtype not in (None, tensor.dtype):
                got = describe(tensor) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ArgumentError(f"x.{name}", got, f"a {str(dtype or 'int8').removeprefix('torch.')} tensor")
        self._check_operand(x.data, (torch.int8, torch.uint8))

    def _check_linked(self, x: QTensor, zero_point: Tensor | None) -> None:
        own_scale, own_zero_point = self._buffers["input_scale"], self._buffers["input_zero_point"]
        if x.scale is own_scale and zero_point is own_zero_point or torch.compiler.is_compiling():
            return
        zero = 0 if zero_point is None else int(zero_point)
        own_zero = 0 if own_zero_point is None else int(own_zero_point)
        if x.scale.numel() != 1 or float(x.scale) != float(own_scale) or zero != own_zero:
            got = f"codes of scale {x.scale.flatten()[:3].tolist()}, zero point {zero}"
            raise ArgumentError("x", got, f"codes of this layer's input: scale {float(own_scale)}, zero point {own_zero}")

    def reference(self, x: Tensor | QTensor, residual: Tensor | None = None) -> Any:
        """What forward must give, from pyquant.numerics alone: equal bits for integer schemes.

        Arguments and result as in forward. Slow.

        Example:
            >>> layer, x = QLinear.from_float(nn.Linear(8, 4), W8A8Dynamic()), torch.randn(3, 8)
            >>> torch.equal(layer(x), layer.reference(x))
            True
        """
        return reference.forward(self, x, residual)

    def kernel_info(self, M: int = 1) -> info.KernelInfo:
        """Which kernel runs a call of M rows on this layer's device, and why.

        Raises ArgumentError for M that is not a whole number >= 0.
        """
        return info.explain(self, M)

    # ---- state

    def _describe(
        self, in_features: int, out_features: int, has_bias: bool, scheme: QScheme, activation: str | None,
        clamp: tuple[float, float] | None, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        _check_scheme(scheme)
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ArgumentError(name, repr(value), "a whole number >= 0")
        if dtype not in weights.FLOAT_TYPES:
            raise ArgumentError("dtype", dtype, "torch.float32, torch.float16 or torch.bfloat16")
        self.in_features, self.out_features, self.scheme, self.dtype = in_features, out_features, scheme, dtype
        self.activation, self.clamp = _activation(activation, clamp)
        self.state_slots = state.slots(scheme, out_features, in_features, has_bias)
        self._weight_name = "weight_packed" if "weight_packed" in self.state_slots else "weight"
        self._gives_codes = scheme.outputs is not None
        self.missing: str | None = None
        self._is_direct = False
        self._is_packed = False
        self._spec: tuple[int, ...] = ()
        self.register_buffer("storage", None, persistent=False)
        for name in state.NUMBERS:
            self.register_buffer(name, None)

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take checked tensors as the state: all of them, or (on an error) none."""
        checked = {name: state.check(name, tensor, self.state_slots[name]) for name, tensor in tensors.items()}
        weight = checked.get(self._weight_name)
        if weight is None:
            raise ArgumentError(self._weight_name, "None", self.state_slots[self._weight_name].text)
        for name, tensor in checked.items():
            if tensor.device != weight.device:
                raise ArgumentError(name, f"device {tensor.device}", f"device {weight.device}, where the codes are")
        missing = next((name for name in self.state_slots if name not in checked), None)
        storage, spec = weight.detach().contiguous(), self._linear_spec(weight.device)
        is_packed = self.scheme.is_integer and missing is None and not weight.is_meta
        if is_packed:
            storage = ops.pack_linear(
                storage, checked["weight_scale"], spec, checked.get("bias"), checked.get("input_scale"),
                checked.get("input_zero_point"), checked.get("output_scale"), checked.get("output_zero_point"),
            )  # fmt: skip
        for name in state.NUMBERS:
            tensor = checked.get(name)
            self._buffers[name] = None if tensor is None else tensor.detach().contiguous()
        self._buffers["storage"], self._spec, self.missing = storage, spec, missing
        self._is_packed, self._is_direct = is_packed, is_packed and not self._gives_codes

    def _linear_spec(self, device: torch.device) -> tuple[int, ...]:
        scheme = self.scheme
        if scheme.inputs is None:
            return ()
        x_qmin, x_qmax = scheme.inputs.code_range
        out_qmin, out_qmax = self._output_range()
        return ops.LinearSpec(
            n=self.out_features, k=self.in_features, w_bits=scheme.weights.bits,
            group_size=scheme.weights.group_size or 0, input="dynamic" if scheme.inputs.dynamic else "static",
            x_qmin=x_qmin, x_qmax=x_qmax, x_symmetric=scheme.inputs.symmetric, activation=self.activation,
            clamp_min=self.clamp[0], clamp_max=self.clamp[1], has_bias="bias" in self.state_slots,
            codes_out=self._gives_codes, out_qmin=out_qmin, out_qmax=out_qmax, layout=ops.layout_for(device),
        ).to_ints()  # fmt: skip

    def _output_range(self) -> tuple[int, int]:
        return (-127, 127) if self.scheme.outputs is None else self.scheme.outputs.code_range

    def _canonical(self) -> Tensor:
        """The weight as state_dict spells it: int8 [N, K], packed uint8 [N, ceil(K / 2)], or 16-bit floats."""
        storage = self._buffers["storage"]
        return ops.unpack_linear(storage, self._spec) if self._is_packed else storage

    def _state(self) -> dict[str, Tensor]:
        held = {name: self._canonical() if name == self._weight_name else self._buffers[name] for name in self.state_slots}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    @property
    def weight(self) -> Tensor:
        """The weight codes, int8 [N, K] (16-bit schemes: the weights). Unpacked anew at each use."""
        canonical = self._canonical()
        return ops.unpack_int4(canonical, self.in_features) if self.scheme.weights.bits == 4 else canonical

    @property
    def weight_packed(self) -> Tensor:
        """4-bit codes two per byte, uint8 [N, ceil(K / 2)], the even column in the low nibble; 4-bit schemes only."""
        if self._weight_name != "weight_packed":
            raise UnsupportedError(f"weight_packed is for 4-bit weights; this layer's scheme is {self.scheme}")
        return self._canonical()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in state.NUMBERS and name in self.__dict__.get("_buffers", {}):
            changed = self._state() | ({} if value is None else {name: value})
            if value is None:
                changed.pop(name, None)
            if name not in self.state_slots and value is not None:
                raise ArgumentError(name, "a tensor", f"None with scheme {self.scheme}")
            self._fill(changed)
            return
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in self._state().items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        here = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        if strict:
            missing_keys.extend(prefix + name for name in self.state_slots if name not in here)
            unexpected_keys.extend(prefix + name for name in here if name not in self.state_slots)
        current = {} if self.missing == self._weight_name else self._state()
        taken = {name: here[name] for name in self.state_slots if name in here}
        if not taken:
            return
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        device = self._buffers["storage"].device
        if device.type == "meta" and not assign:
            error_msgs.append(f"{prefix or 'QLinear'}: is on the meta device; use load_state_dict(..., assign=True)")
            return
        try:
            for name, value in taken.items():
                state.check(name, value, self.state_slots[name])
            moved = {name: value.detach() if assign else value.detach().to(device, copy=True) for name, value in taken.items()}
            kept = {name: tensor for name, tensor in current.items() if not (assign and tensor.is_meta)}
            self._fill(kept | moved)
        except (PyquantError, KeyError) as error:
            error_msgs.append(f"{prefix or 'QLinear'}: {error}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QLinear:
        storage = self._buffers["storage"]
        probe = fn(torch.empty(0, dtype=self.dtype, device=storage.device))
        if storage.is_meta and not probe.is_meta:  # to_empty: tensors without numbers, until a state is loaded
            self.missing = self._weight_name
        if probe.device == storage.device or storage.is_meta:
            for name, tensor in self._buffers.items():
                if tensor is not None:
                    self._buffers[name] = state.same_type(fn, tensor)
        else:
            moved = {name: state.same_type(fn, tensor) for name, tensor in self._state().items()}
            self._fill(moved)
        if probe.dtype in weights.FLOAT_TYPES:
            self.dtype = probe.dtype
        return self

    def extra_repr(self) -> str:
        """The layer in one line, as print(model) shows it."""
        words = [f"in_features={self.in_features}", f"out_features={self.out_features}", f"bias={'bias' in self.state_slots}"]
        words.append(f"scheme={self.scheme}")
        if self.activation != "none":
            words.append(f"activation={self.activation}{self.clamp if self.activation == 'clamp' else ''}")
        return ", ".join(words) + (f", without {self.missing}" if self.missing else "")


def _check_scheme(scheme: object) -> None:
    if not isinstance(scheme, QScheme):
        raise ArgumentError("scheme", f"{type(scheme).__name__} {scheme!r}"[:120], "a QScheme such as W8A8Dynamic()")


def _activation(name: str | None, clamp: tuple[float, float] | None) -> tuple[str, tuple[float, float]]:
    if name is None:
        name = "none" if clamp is None else "clamp"
    if name not in ops.ACTIVATIONS:
        raise ArgumentError("activation", repr(name), ", ".join(map(repr, (None, *ops.ACTIVATIONS))))
    if name != "clamp":
        if clamp is not None:
            raise ArgumentError("clamp", clamp, f"None with activation '{name}'")
        return name, (0.0, 0.0)
    try:
        low, high = (float(limit) for limit in clamp or ())
    except (TypeError, ValueError):
        raise ArgumentError("clamp", repr(clamp), "(low, high) with activation 'clamp'") from None
    if not low <= high:
        raise ArgumentError("clamp", clamp, "(low, high) with low <= high")
    return name, (low, high)


def _needs_grad(x: Tensor, residual: Tensor | None) -> bool:
    return x.requires_grad or (residual is not None and residual.requires_grad)


def _signed(x: QTensor) -> tuple[Tensor, Tensor | None]:
    """int8 codes and their zero point; uint8 codes become the int8 codes of the same real numbers."""
    if x.data.dtype != torch.uint8:
        return x.data, x.zero_point
    zero = torch.zeros_like(x.scale, dtype=torch.int32) if x.zero_point is None else x.zero_point
    return (x.data ^ 128).view(torch.int8), zero - 128

