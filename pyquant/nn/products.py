"""Which float matrices a model multiplies by, seen in one run: what no class, no name and no shape can tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from pyquant.core.names import words
from pyquant.nn.flow import Calls, call
from pyquant.nn.linear_state import LinearState
from pyquant.nn.matrices import is_matrix
from pyquant.nn.weight_view import QWeight

MULTIPLIED: Final = "multiplied"
OTHER: Final = "other"
ADDED: Final = "added"
NOT_REACHED: Final = "not reached"
ONLY_ADDED: Final = "added or looked up in, not multiplied by, as a run showed"

# ATen's products of matrices -> which of its operands are multiplied
_ALL: Final = range(64)
_PRODUCTS: Final[dict[str, range]] = {
    **dict.fromkeys(
        words(
            """mm bmm mv dot vdot matmul linear einsum tensordot inner bilinear _trilinear chain_matmul linalg_multi_dot
            kron outer ger cdist _cdist_forward _euclidean_dist conv1d conv2d conv3d conv_transpose1d conv_transpose2d
            conv_transpose3d convolution _convolution mkldnn_convolution cudnn_convolution miopen_convolution
            mkldnn_linear _int_mm _scaled_mm _grouped_mm _scaled_grouped_mm _weight_int8pack_mm mkldnn_rnn_layer
            _cudnn_rnn miopen_rnn lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
            _native_multi_head_attention _transformer_encoder_layer_fwd"""
        ),
        _ALL,
    ),
    **dict.fromkeys(("addmm", "addbmm", "baddbmm", "addmv", "addr", "sspaddmm", "_addmm_activation"), range(1, 3)),
    # query, key and value; a mask is added
    **dict.fromkeys(
        words(
            """scaled_dot_product_attention _scaled_dot_product_flash_attention
            _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
            _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
            _scaled_dot_product_attention_math"""
        ),
        range(3),
    ),
}
# What takes rows out of a table: of a matrix the rows are data, of a stack of matrices they are matrices still.
_LOOKUPS: Final = frozenset({"index", "index_select", "gather", "take"})
_TABLES: Final = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"})
# What meets data without being multiplied with it.
_ADDERS: Final = words(
    """add add_ sub sub_ rsub cat concat stack where copy_ masked_scatter masked_fill index_put index_put_ index_add
    index_copy scatter scatter_add slice_scatter select_scatter grid_sampler grid_sampler_2d eq ne lt gt le ge maximum
    minimum"""
)
_ADDITIONS: Final = _LOOKUPS | _TABLES | frozenset(_ADDERS)
_OURS: Final = "pyquant"
_KNOWN: Final = ("prim", "prims", _OURS)  # beside ATen: operators that multiply nothing in floating point


@dataclass
class Seen:
    """What a run did with one matrix."""

    name: str
    shape: tuple[int, ...]
    size: int  # bytes
    is_held: bool = True  # by a module, as a parameter or buffer in floating point
    is_view: bool = False  # the weight of a quantised layer, dequantised for code other than the layer's forward
    products: set[str] = field(default_factory=set)  # operators that multiply by it
    others: set[str] = field(default_factory=set)  # and those that read it otherwise together with data

    @property
    def use(self) -> str:
        """The strongest of its uses."""
        if self.products:
            return MULTIPLIED
        if self.others - _ADDITIONS:
            return OTHER
        return ADDED if self.others else NOT_REACHED


def watch_products(model: nn.Module, example_inputs: object) -> list[Seen]:
    """Run the model once, in evaluation mode and without gradients. -> what became of every float matrix, as named.

    A matrix is followed through views, casts, copies and whatever is computed from parameters alone (weight norm,
    merged adapters), so that what is multiplied is found under the name of what is held.
    """
    watcher = _Watcher(model, example_inputs)
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad(), watcher.calls.watched(), watcher:
            call(model, example_inputs)
    finally:
        for module in training:
            module.training = True
    return [seen for seen in watcher.seen.values() if seen.is_held or seen.products]


def only_added(model: nn.Module, example_inputs: object) -> set[str]:
    """Names of the modules whose own matrices a run only adds or looks up in: position tables and the like."""
    uses: dict[str, set[str]] = {}
    for seen in watch_products(model, example_inputs):
        uses.setdefault(seen.name.rpartition(".")[0], set()).add(seen.use)
    return {name for name, found in uses.items() if found == {ADDED}}


class _Watcher(TorchDispatchMode):
    """Follows every tensor of a run: of it is known which held matrices it is made of (none: a constant), or that it
    is data (None)."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, example_inputs: object) -> None:
        super().__init__()
        self.calls = Calls(model)
        self.seen: dict[str, Seen] = {}
        self._origin: Any = WeakTensorKeyDictionary()
        self._memory: dict[int, frozenset[str]] = {}  # of tensors that live as long as the model
        for value in tree_leaves(example_inputs):
            if isinstance(value, Tensor):
                self._origin[value] = None
        for place, module in model.named_modules():
            if not isinstance(module, LinearState):
                for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                    if tensor is not None and tensor not in self._origin:
                        self._hold(f"{place}.{name}" if place else name, tensor)

    def _hold(self, name: str, tensor: Tensor) -> None:
        names = frozenset([name] if tensor.is_floating_point() else [])
        if is_matrix(tensor):
            self._see(name, tensor)
        if not tensor.is_meta and type(tensor.data) is Tensor and tensor.numel():
            self._memory.setdefault(tensor.data_ptr(), names)
        self._origin[tensor] = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = str(getattr(getattr(func, "_schema", None), "name", func)).rpartition("::")
        operands = [(i, v) for i, arg in enumerate((*args, kwargs)) for v in tree_leaves(arg) if isinstance(v, Tensor)]
        made_of = self._result(name, args, [value for _, value in operands])
        if name in _PRODUCTS if space == "aten" else space not in _KNOWN:
            for i, value in operands:
                if i not in _PRODUCTS.get(name, _ALL):
                    self._note(value, "add")
                elif value.is_floating_point():
                    self._multiplied(value, name if space == "aten" else f"{space}::{name}")
            made_of = None
        elif made_of is None:
            for _, value in operands:
                self._note(value, name)
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._origin[value] = made_of
        return result

    def _result(self, name: str, args: tuple[Any, ...], operands: list[Tensor]) -> frozenset[str] | None:
        """What the result of an operator is made of: of what its operands are, and data where one of them is."""
        if name == "copy_":
            return self._of(args[1])
        if name in _LOOKUPS and isinstance(args[0], Tensor) and args[0].dim() > 2:
            return self._of(args[0])
        origins: frozenset[str] = frozenset()
        for value in operands:
            one = self._of(value)
            if one is None:
                return None
            origins |= one
        return origins

    def _of(self, value: Any) -> frozenset[str] | None:
        """Names of the held matrices that a tensor is made of; None: it is data."""
        if not isinstance(value, Tensor):
            return None
        if isinstance(value, QWeight) and value not in self._origin:
            return frozenset([self._view(value)])
        if value in self._origin:
            origins: frozenset[str] | None = self._origin[value]
            return origins
        if not value.is_meta and type(value) is Tensor and value.numel():
            return self._memory.get(value.data_ptr())
        return None

    def _multiplied(self, value: Tensor, op: str) -> None:
        made_of = self._of(value)
        if made_of is None and value not in self._origin and is_matrix(value):
            made_of = frozenset([self._foreign(value)])
        for name in made_of or ():
            if name in self.seen:
                self.seen[name].products.add(op)

    def _note(self, value: Tensor, op: str) -> None:
        for name in self._of(value) or ():
            if name in self.seen:
                self.seen[name].others.add(op)

    def _view(self, weight: QWeight) -> str:
        """The weight of a quantised layer read by other code than its own forward: dequantised."""
        layer = None if weight.home is None else weight.home()
        known = self.calls.names.get(id(layer))
        name = f"a weight in {self._place()}" if known is None else f"{known}.weight"
        self._see(name, weight, is_held=False, is_view=True)
        return name

    def _foreign(self, tensor: Tensor) -> str:
        name = f"{list(tensor.shape)} in {self._place()}"
        self._see(name, tensor, is_held=False)
        self._origin[tensor] = frozenset([name])
        return name

    def _see(self, name: str, tensor: Tensor, is_held: bool = True, is_view: bool = False) -> None:
        size = tensor.numel() * tensor.element_size()
        self.seen.setdefault(name, Seen(name, tuple(tensor.shape), size, is_held, is_view))

    def _place(self) -> str:
        return self.calls.place() or "the model"
