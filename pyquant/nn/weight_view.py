"""The weight of a quantised layer as the rest of PyTorch sees it: a float tensor that is held as codes.

Looking at it (dtype, shape, device, isinstance) costs nothing; computing with it or reading it out dequantises it.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyquant import ops
from pyquant.core.dtypes import FLOATS
from pyquant.core.patches import Patches
from pyquant.core.scheme import TensorScheme
from pyquant.errors import UnsupportedError
from pyquant.nn import weights

_aten = torch.ops.aten
_SAME: Final = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
_SCALED: Final = {  # in place, by a number: the exponent of 1 / number or of the number
    _aten.mul_.Tensor: 1,
    _aten.mul_.Scalar: 1,
    _aten.div_.Tensor: -1,
    _aten.div_.Scalar: -1,
}


@dataclass(frozen=True)
class Form:
    """How the tensors that hold a weight become real numbers."""

    columns: int  # K
    scheme: TensorScheme | None  # of the codes; None: the storage holds 16-bit floats
    spec: tuple[int, ...] = ()  # of the packed buffer (LinearSpec.to_ints); empty: the weight as state_dict spells it
    patches: Patches | None = None  # of a convolution, whose weight is [N, channels of a group, height, width]

    def codes(self, storage: Tensor, scale: Tensor | None) -> Tensor:
        """int8 codes [N, K], or the 16-bit floats."""
        canonical = self.canonical(storage, scale)
        return canonical if self.scheme is None else weights.codes_of(canonical, self.columns, self.scheme.code_type)

    def canonical(self, storage: Tensor, scale: Tensor | None) -> Tensor:
        """The weight as state_dict spells it: int8 [N, K], packed uint8 [N, ceil(K / 2)], or 16-bit floats."""
        if not self.spec:
            return storage
        codes = ops.unpack_linear(storage, self.spec)
        return (
            codes if self.scheme is None or scale is None else weights.of_packed(codes, scale, self.scheme, self.spec)
        )

    def matrix(self, storage: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
        """float32 [N, K]: scale * (code - zero_point)."""
        codes = self.codes(storage, scale)
        if self.scheme is None or scale is None:
            return codes.to(torch.float32)
        return weights.dequantise_weight(codes, scale, zero_point, self.scheme)

    def real(self, storage: Tensor, scale: Tensor | None, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The weight in the shape and type of its float twin."""
        matrix = self.matrix(storage, scale, zero_point)
        if self.patches is not None:
            matrix = self.patches.image(matrix)
        # Tensor.to leaves a check of its operand in exported graphs, which keeps an unused weight alive
        real: Tensor = matrix if matrix.dtype == dtype else _aten._to_copy(matrix, dtype=dtype)
        return real

    def shape(self, rows: int) -> tuple[int, ...]:
        """Shape of the float twin."""
        if self.patches is None:
            return rows, self.columns
        return rows, self.columns // self.patches.pixels, *self.patches.kernel_size


def weight_of(
    storage: Tensor, scale: Tensor | None, zero_point: Tensor | None, form: Form, rows: int, dtype: torch.dtype
) -> Tensor:
    """The float weight [rows, ...] that a layer shows: a QWeight, or plain numbers where Python itself is recorded.

    torch.compile, torch.export and torch.jit know no tensor of a new type; their graphs hold the ops that dequantise,
    which a compiler drops again where only dtype or shape were looked at.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return form.real(storage, scale, zero_point, dtype)
    return QWeight(storage, scale, zero_point, form, rows, dtype)


class QWeight(Tensor):
    """A float weight held as codes: dtype, shape and device of the float layer's weight, and its numbers on demand.

    storage      packed buffer or canonical weight (Form.spec says which); shared with the layer, not copied.
    scale        float32 [N] or [N, K / group_size]; None: 16-bit floats.
    zero_point   int32 of the same shape, or None.
    form, rows, dtype   how they are read, the number of output features, and the float type to show.

    detach, .to(device) and casts between float types keep the codes. Any other operation sees the dequantised tensor,
    computed for each use: float32 scale * (code - zero_point), rounded once to `dtype`. Slices and copies are ordinary
    tensors of their own. Writing raises UnsupportedError: numbers that no code stands for have no place here; but for
    a layer's weight that is multiplied or divided in place by a power of two, which its scales take exactly.
    """

    storage_: Tensor
    scale_: Tensor | None
    zero_point_: Tensor | None
    form: Form
    home: weakref.ref[Any] | None = None  # the layer that showed it

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, storage: Tensor, scale: Tensor | None, zero_point: Tensor | None, form: Form, rows: int, dtype: torch.dtype
    ) -> QWeight:
        self: QWeight = Tensor._make_wrapper_subclass(cls, form.shape(rows), dtype=dtype, device=storage.device)  # type: ignore[attr-defined]
        self.storage_, self.scale_, self.zero_point_, self.form = storage, scale, zero_point, form
        # DLPack and most C++ that takes it past Python raise instead of following a null pointer
        torch._C._set_throw_on_mutable_data_ptr(self)  # type: ignore[attr-defined]
        return self

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """The numbers, as an ordinary tensor of this dtype, shape and device."""
        return self.form.real(self.storage_, self.scale_, self.zero_point_, self.dtype)

    @property
    def canonical(self) -> Tensor:
        """The weight as state_dict spells it."""
        return self.form.canonical(self.storage_, self.scale_)

    # ---- what PyTorch asks of a tensor that wraps others

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, QWeight):
            if func in _SAME:
                return first._like()
            if func is _aten._to_copy.default and (moved := first._moved(**kwargs)) is not None:
                return moved
            if func in _SCALED and first._scaled(args[1], _SCALED[func]):
                return first
        if func is _aten.embedding.default and isinstance(first, QWeight) and first._has_plain_rows():
            return first._rows(args[1])
        _refuse_writing(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(QWeight, QWeight.dequantize, (args, kwargs))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["storage_", "scale_", "zero_point_"]
        return [name for name in names if getattr(self, name) is not None], (self.form, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: object) -> QWeight:
        form, dtype = context
        return QWeight(inner["storage_"], inner.get("scale_"), inner.get("zero_point_"), form, size[0], dtype)

    def _like(self, dtype: torch.dtype | None = None) -> QWeight:
        held = (self.storage_, self.scale_, self.zero_point_)
        return QWeight(*held, self.form, self.shape[0], dtype or self.dtype)

    def _moved(
        self, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **others: Any
    ) -> QWeight | None:
        """The same codes elsewhere or shown in another float type; None for what is no such move."""
        if dtype is not None and dtype not in FLOATS:
            return None
        if others.get("pin_memory") or others.get("layout") not in (None, torch.strided):
            return None
        if device is None or device == self.device:
            return self._like(dtype)
        # the layout of a packed buffer goes with its device
        form = Form(self.form.columns, self.form.scheme, (), self.form.patches)
        scale, zero_point = (None if t is None else t.to(device) for t in (self.scale_, self.zero_point_))
        storage = self.canonical.to(device)
        return QWeight(storage, scale, zero_point, form, self.shape[0], dtype or self.dtype)

    def _scaled(self, value: object, sign: int) -> bool:
        """Multiply the layer's weight by value ** sign; False, and nothing done, where its scales cannot take that."""
        layer, factor = None if self.home is None else self.home(), _power_of_two(value)
        if layer is None or factor is None or not layer._scale_weight(factor**sign):
            return False
        now = layer.weight
        self.storage_, self.scale_, self.form = now.storage_, now.scale_, now.form
        return True

    def _has_plain_rows(self) -> bool:
        scheme = self.form.scheme
        return not self.form.spec and self.form.patches is None and (scheme is None or not scheme.code_type.is_packed)

    def _rows(self, indices: Tensor) -> Tensor:
        """The numbers of some rows: a table is not dequantised for the few that are looked up."""
        flat = indices.reshape(-1)
        held = (None if t is None else t[flat] for t in (self.scale_, self.zero_point_))
        rows = self.form.matrix(self.storage_[flat], *held).to(self.dtype)
        return rows.reshape(*indices.shape, self.form.columns)

    # ---- reading it out past the dispatcher

    def data_ptr(self) -> int:
        """The address of the codes, which tells two weights apart; floats have none."""
        return self.storage_.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the codes."""
        return self.storage_.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        """The numbers as an array."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        """The numbers as lists."""
        return self.dequantize().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.dequantize().numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self.dequantize().__dlpack__(**options)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = "16-bit floats" if self.form.scheme is None else f"{self.form.scheme.bits}-bit codes"
        if self.is_meta:
            return f"QWeight({held}, shape={tuple(self.shape)}, dtype={self.dtype}, device='meta')"
        return f"QWeight({repr(self.dequantize()).removeprefix('tensor(').removesuffix(')')}, {held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QWeight:
        if id(self) not in memo:
            scale, zero_point = (copy.deepcopy(t, memo) for t in (self.scale_, self.zero_point_))
            storage = copy.deepcopy(self.storage_, memo)
            memo[id(self)] = QWeight(storage, scale, zero_point, self.form, self.shape[0], self.dtype)
        copied: QWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Alone in a file it is an ordinary tensor: readable anywhere, with weights_only and without pyquant."""
        return self.dequantize().__reduce_ex__(protocol)

    # ---- writing

    def __setitem__(self, index: object, value: object) -> NoReturn:
        _refuse("assigning to elements")

    @property
    def data(self) -> Tensor:
        """Itself: there is no gradient to leave behind."""
        return self._like()

    @data.setter
    def data(self, value: object) -> None:
        _refuse("assigning .data")

    def requires_grad_(self, requires_grad: bool = True) -> QWeight:
        """False only: codes have no gradient."""
        if requires_grad:
            _refuse("asking for a gradient")
        return self

    def share_memory_(self) -> QWeight:
        """Share what is held."""
        for tensor in (self.storage_, self.scale_, self.zero_point_):
            if tensor is not None:
                tensor.share_memory_()
        return self


def _power_of_two(value: object) -> float | None:
    if isinstance(value, Tensor):
        if value.dim() or value.is_meta or value.is_complex():
            return None
        value = value.item()
    is_one = isinstance(value, (int, float)) and 2.0**-126 <= value <= 2.0**126 and math.frexp(value)[0] == 0.5
    return float(value) if is_one else None  # type: ignore[arg-type]


def _refuse_writing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if any(isinstance(leaf, QWeight) for leaf in pytree.tree_leaves(value)):
                _refuse(str(func))


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(
        f"{what}: the weight of a quantised layer is held as codes and cannot be written; load a state_dict, assign "
        "codes (layer.weight = int8 tensor), or quantise again with from_float"
    )
