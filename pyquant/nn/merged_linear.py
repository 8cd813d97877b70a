"""MergedLinear: one of several QLinears that read the same tensor and are one product with one quantise."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from pyquant.core import arguments
from pyquant.core.qtensor import QTensor
from pyquant.errors import ArgumentError
from pyquant.nn import state
from pyquant.nn.kernel_info import KernelInfo
from pyquant.nn.obstacles import is_watched
from pyquant.nn.qlinear import QLinear
from pyquant.nn.weight_view import Form

Self = TypeVar("Self", bound="MergedLinear")
_OF_ROWS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "bias")  # a row for each output


@dataclass
class _Seen:
    """What the group gave for one tensor, and which members have not asked for theirs yet."""

    x: weakref.ref[Tensor]
    moment: tuple[Any, ...]
    parts: list[Tensor | None]
    numbers: Tensor | None  # a copy of those of x, where writes to it are not counted


class Group:
    """The one product, and its result for the last tensor until every member has taken its part.

    A part is given for the very same tensor object in the same moment (_moment) only, so a member's result never
    depends on who was called before: at worst the product is computed once more.
    """

    members: weakref.WeakSet[MergedLinear]  # those that read this product now; a copy of the group knows its copies

    def __init__(self, layers: Sequence[QLinear]) -> None:
        first = layers[0]
        self.members = weakref.WeakSet()
        self.sizes = [layer.out_features for layer in layers]
        states = [layer._state() for layer in layers]
        joined = {n: torch.cat([s[n] for s in states]) if n in _OF_ROWS else t for n, t in states[0].items()}
        self.whole = QLinear.__new__(QLinear)
        nn.Module.__init__(self.whole)
        self.whole._describe(
            first.in_features,
            sum(self.sizes),
            "bias" in first.state_slots,
            first.scheme,
            first.activation,
            first.clamp if first.activation == "clamp" else None,
            first.dtype,
        )
        self.whole._fill(joined)
        self._seen: _Seen | None = None

    def rows(self, place: int) -> slice:
        """The rows of a member."""
        begin = sum(self.sizes[:place])
        return slice(begin, begin + self.sizes[place])

    def part(self, x: Any, place: int, collect: Callable[[], Any] | None = None) -> Any:
        """A member's part of the product.

        x        what is to be the same tensor for all members, and the operand where `collect` is None.
        collect  () -> the operand, which ranks put together: all must do it, or none.
        """
        moment = _moment(x)
        if collect is not None and moment is not None and x.is_inference():
            moment = (
                None  # the numbers of x would tell, and each rank has others: one might collect where another waits
            )
        if moment is None:
            return self.whole(x if collect is None else collect())[..., self.rows(place)].contiguous()
        seen = self._seen  # once: another thread may put its own there
        mine = seen.parts[place] if seen is not None and _is_for(seen, x, moment) else None  # once, for the same reason
        if seen is None or mine is None:
            numbers = _uncounted(x)  # before the product: a write meanwhile is noticed
            y = self.whole(x if collect is None else collect())
            parts = [part.contiguous() for part in y.split(self.sizes, -1)]
            seen = _Seen(weakref.ref(cast(Tensor, x), self._dropped), moment, list(parts), numbers)
            self._seen = seen
            mine = parts[place]
        seen.parts[place] = None
        if all(part is None for part in seen.parts):
            self.forget()
        return mine

    def forget(self) -> None:
        """Drop what nobody has asked for: the numbers of the layers change."""
        self._seen = None

    def _dropped(self, x: weakref.ref[Tensor]) -> None:
        if self._seen is not None and self._seen.x is x:
            self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "members"} | {"_seen": None}

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held, members=weakref.WeakSet())


class MergedLinear(QLinear):
    """A QLinear whose weights are rows of a product that it shares with others, made by merge_.

    To the code of a model, to state_dict, load_state_dict, save_pretrained, dequantize_ and quantization_report it is
    the QLinear that it was, under its name. The codes are held once, in the product. A call computes the results of
    all members; the others take theirs when they are called with the same tensor, under torch.no_grad().
    """

    _group: Group
    _place: int
    alone_kind: ClassVar[type[QLinear]] = QLinear  # what a member is outside of a group

    @classmethod
    def of(cls, layer: QLinear, group: Group, place: int) -> MergedLinear:
        """The member of a group that takes the place of a layer."""
        new = cls.__new__(cls)
        new.__dict__.update(layer.__dict__)
        new._join(group, place)
        return new

    @classmethod
    def become(cls, layer: QLinear, group: Group, place: int) -> None:
        """Make a layer the member of a group, in place."""
        if isinstance(layer, MergedLinear):
            layer._group.members.discard(layer)
        layer.__class__ = cls
        cast(MergedLinear, layer)._join(group, place)

    def _join(self, group: Group, place: int) -> None:
        self.__dict__["_buffers"], self.__dict__["_parameters"] = {}, dict(self._parameters)
        self.__dict__.update(_group=group, _place=place)
        group.members.add(self)
        self._show()

    def leave(self) -> None:
        """Become a layer with weights of its own, in place. The group goes on computing these rows for nobody: who
        takes a layer out of it makes a group of the others (regroup.separate)."""
        alone = self.alone({name: tensor.clone() for name, tensor in self._state().items()})
        self._group.members.discard(self)
        self.__class__ = self.alone_kind  # type: ignore[assignment]
        self.__dict__.clear()
        self.__dict__.update(alone.__dict__)

    def __setstate__(self, held: dict[str, Any]) -> None:
        super().__setstate__(held)
        self._group.members.add(self)

    # ---- the state: rows of the whole

    def _show(self) -> None:
        """Let the numbers be views of the whole's."""
        whole, rows = self._group.whole, self._group.rows(self._place)
        for name in state.NUMBERS:
            tensor = whole._buffers[state.held(name)]
            self._buffers[state.held(name)] = tensor[rows] if tensor is not None and name in _OF_ROWS else tensor
        scheme = None if self.scheme.is_float else self.scheme.weights
        self._parameters["stand_in"] = whole._parameters["stand_in"]
        self.dtype, self.missing, self._form = whole.dtype, whole.missing, Form(self.in_features, scheme, (), None)
        self._is_direct, self._is_packed, self._how = False, False, None

    @property
    def _plain_weight(self) -> Tensor:  # type: ignore[override]
        return self._group.whole._canonical()[self._group.rows(self._place)]

    storage = _plain_weight  # type: ignore[assignment]

    @property
    def weight(self) -> Tensor:
        """As QLinear.weight; looking unpacks the codes of the group."""
        self._buffers["storage"] = self._plain_weight
        try:
            return super().weight
        finally:
            del self._buffers["storage"]

    def _fill(self, tensors: Mapping[str, Tensor], *, in_place: bool = False, waits: bool = False) -> None:
        whole, rows, new = self._group.whole, self._group.rows(self._place), {}
        for name, held in whole._state().items():
            given = tensors.get(name)
            given = None if given is None else state.check(name, given, self.state_slots[name])
            if given is None or (name not in _OF_ROWS and not torch.equal(given.to(held.device), held)):
                got = "None" if given is None else f"{given.tolist()}, where its group has {held.tolist()}"
                raise ArgumentError(name, got, "one for all members of a group: load or assign before merge_")
            if name not in _OF_ROWS:
                new[name] = given
                continue
            new[name] = held.to(given.device).clone()
            new[name][rows] = given
        whole._fill(new, in_place=in_place, waits=waits)
        self._group.forget()
        self._show()

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._group.whole._apply(fn)  # by the first member; the others find it there
        self._group.forget()
        self._show()
        return self

    def _twin(self) -> QLinear:  # type: ignore[override]
        """A layer with containers of its own, which its caller fills."""
        twin = self.alone_kind.__new__(self.alone_kind)
        twin.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_group", "_place")})
        twin.__dict__["_buffers"], twin.__dict__["_parameters"] = {"storage": None}, dict(self._parameters)
        twin.__dict__["_non_persistent_buffers_set"] = {"storage"}
        twin.__dict__["_spec"] = ()
        return twin

    def alone(self, numbers: Mapping[str, Tensor] | None = None) -> QLinear:
        """The same layer with weights of its own: `numbers`, or views of those that it has."""
        twin = self._twin()
        twin._fill(self._state() if numbers is None else numbers, waits=self._waits)
        return twin

    # ---- running

    def forward(
        self,
        x: Tensor | QTensor | None = None,
        residual: Tensor | None = None,
        *,
        input: Tensor | QTensor | None = None,
    ) -> Any:
        """As QLinear.forward. With a residual the layer runs alone, and its weights are packed for that call."""
        rows: Any = arguments.x_or_input(x, input)
        if isinstance(rows, Proxy):
            return self._forward_general(rows, residual)  # type: ignore[arg-type]
        if residual is not None:
            return self.alone()(rows, residual)
        self._group.whole.training = self.training
        return self._group.part(rows, self._place)

    def with_other(self, other: MergedLinear, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The results of this layer and another one, views of the group's: for callers that have both at once. None
        where the group has more members, or somebody watches the calls of the two."""
        group = self._group
        if other._group is not group or len(group.sizes) != 2 or is_watched(self) or is_watched(other):
            return None
        y, first = group.whole(x), group.sizes[0]
        parts = y.narrow(-1, 0, first), y.narrow(-1, first, group.sizes[1])
        return parts[self._place], parts[other._place]

    def kernel_info(self, M: int = 1) -> KernelInfo:
        """Which kernel runs the product of the whole group."""
        return self._group.whole.kernel_info(M)

    def extra_repr(self) -> str:
        """The layer in one line, as print(model) shows it."""
        return f"{super().extra_repr()}, {self._place + 1} of {len(self._group.sizes)} merged"


# How a layer is called -> what it is in a group, for every class that can be in one.
_MEMBERS: Final[dict[Callable[..., Any], type[MergedLinear]]] = {}


def register_member(kind: type[MergedLinear]) -> None:
    """Let layers that are called as kind.alone_kind is be members of groups, of this kind."""
    _MEMBERS[kind.alone_kind.forward] = _MEMBERS[kind.forward] = kind


register_member(MergedLinear)


def member_kind(layer: QLinear) -> type[MergedLinear] | None:
    """What a layer is in a group; None: its calls are its own, and no group makes them.

    Example:
        >>> member_kind(QLinear(8, 4)).__name__
        'MergedLinear'
    """
    return None if "forward" in layer.__dict__ else _MEMBERS.get(type(layer).forward)


def _is_for(seen: _Seen, x: object, moment: tuple[Any, ...]) -> bool:
    same = seen.x() is x and seen.moment == moment
    return same and (seen.numbers is None or same_bits(seen.numbers, cast(Tensor, x)))


def _uncounted(x: object) -> Tensor | None:
    """A copy of a tensor of torch.inference_mode(), which does not count writes to it: comparing tells, and costs less
    than a product on the CPU."""
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits: NaNs are equal to themselves, and -0 is not 0.

    Example:
        >>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
        True
        >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return torch.equal(a.view(whole), b.view(whole))


def _moment(x: object) -> tuple[Any, ...] | None:
    """What must be the same for the result of a tensor to be the same: how often it was written, where and in what mode
    the call is made. None: a result must not be kept."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return None  # with gradients each call needs a graph of its own; compilers cannot follow what is kept
    if type(x) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None
    mode = torch.is_autocast_enabled(x.device.type), torch.autograd.forward_ad._current_level
    if x.is_inference():  # writes are not counted: the CPU compares the numbers (_uncounted), a GPU would have to wait
        return mode if x.device.type == "cpu" and x.is_floating_point() else None
    if x.device.type != "cuda":
        return x._version, *mode
    stream = torch.cuda.current_stream(x.device).cuda_stream
    return x._version, *mode, stream, torch.cuda.is_current_stream_capturing()
