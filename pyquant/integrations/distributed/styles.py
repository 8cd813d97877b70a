"""PyquantColwise, PyquantRowwise, PyquantExpertParallel: what parallelize_module does to layers that hold codes."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from pyquant.core import arguments
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.integrations.distributed.embedding import ColwiseQEmbedding, RowwiseQEmbedding
from pyquant.integrations.distributed.experts import SharedQExperts
from pyquant.integrations.distributed.layer import ColwiseQLinear
from pyquant.integrations.distributed.layouts import (
    EXPERT_PARALLEL,
    TENSOR_PARALLEL,
    Layouts,
    bounds,
    one_dimension,
    one_placement,
)
from pyquant.integrations.distributed.rowwise import FLOAT, RowwiseQLinear, sums_are_exact
from pyquant.integrations.distributed.state import Share
from pyquant.nn.experts import QExperts
from pyquant.nn.hadamard_linear import HadamardLinear
from pyquant.nn.linear_state import LinearState
from pyquant.nn.merged_linear import MergedLinear
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.regroup import reunite, separate
from pyquant.nn.reordered import Reordered


class PyquantColwise(ColwiseParallel):
    """torch's ColwiseParallel for a QLinear, QEmbedding or HadamardLinear: each rank holds some of the outputs.

    input_layouts, output_layouts, use_local_output   as in ColwiseParallel: None are Replicate() and Shard(-1).
    A float Linear or Embedding, which quantize_ left alone, is treated as ColwiseParallel does. Codes are cut before
    they are packed for the device, and every rank's outputs have the bits that they have on one (schemes with
    floating-point inputs: within the tolerance of docs/numerics.md 8). Outputs that the number of ranks does not divide
    are cut as Shard cuts: the last ranks have fewer.
    Layers that merge_ joined stay one product: each rank's holds its share of each of them.
    Of a mesh of several dimensions the one named 'tp' is taken.
    Raises UnsupportedError naming what cannot be cut, and why; ArgumentError for a mesh without such a dimension.

    Example:
        >>> PyquantColwise().output_layouts
        (Shard(dim=-1),)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self._given = (
            one_placement("input_layouts", input_layouts, Replicate()),
            one_placement("output_layouts", output_layouts, Shard(-1)),
            arguments.flag("use_local_output", use_local_output),
        )
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dimension(device_mesh)
        if not is_ours(module):
            check_not_simulating(module)
            return super()._apply(module, mesh)
        layouts, source = Layouts(mesh, *self._given), self.src_data_rank
        check_whole(module)
        if isinstance(module, QEmbedding):
            ColwiseQEmbedding.take(module, layouts, source)
            return module
        layer = inner_of(module)
        check_layer(layer)
        if isinstance(layer, MergedLinear):
            separate(layer)
        ColwiseQLinear.take(layer, layouts, source)
        reunite(layer)  # with those that were cut before
        if isinstance(module, HadamardLinear):
            module.out_features = layer.out_features
        return module


class PyquantRowwise(RowwiseParallel):
    """torch's RowwiseParallel for a QLinear, QEmbedding or HadamardLinear: each rank holds some of the inputs.

    input_layouts, output_layouts, use_local_output   as in RowwiseParallel: None are Shard(-1) and Replicate() (of an
                                                      embedding: Replicate() both).
    The ranks' accumulators are added as int32, and bias, activation and residual follow once: the bits of one rank,
    where a row of the weight has one scale (also of two levels). Ranges of dynamic inputs are those of whole rows.
    With group scales, and floating-point inputs, float32 sums are added instead, whose order no library fixes; the
    layer's repr says so, and docs/distributed.md by how much they may differ.
    Raises UnsupportedError naming what cannot be cut, and why: groups or blocks that lie on two ranks, with both
    numbers.

    Example:
        >>> PyquantRowwise(output_layouts=Shard(1)).output_layouts
        (Shard(dim=1),)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self._inputs = input_layouts
        one_placement("input_layouts", input_layouts, Shard(-1))
        self._outputs = one_placement("output_layouts", output_layouts, Replicate())
        arguments.flag("use_local_output", use_local_output)
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dimension(device_mesh)
        if not is_ours(module):
            check_not_simulating(module)
            return super()._apply(module, mesh)
        usual = Replicate() if isinstance(module, QEmbedding) else Shard(-1)
        inputs = self._inputs or usual
        layouts = Layouts(mesh, inputs, self._outputs, self.use_local_output)
        check_whole(module)
        if isinstance(module, QEmbedding):
            RowwiseQEmbedding.take(module, layouts, self.src_data_rank)
            return module
        layer = inner_of(module)
        check_layer(layer)
        check_columns(layer, layouts.world, module.block if isinstance(module, HadamardLinear) else 1)
        if isinstance(module, HadamardLinear) and inputs not in (Shard(-1),):
            raise UnsupportedError(f"input_layouts={inputs} of a HadamardLinear; allowed: Shard(-1)")
        if isinstance(layer, MergedLinear):
            separate(layer)
        RowwiseQLinear.take(layer, layouts, self.src_data_rank)
        if layer.scheme.is_integer and not sums_are_exact(layer.scheme):
            layer.__dict__["_note_before"] = layer.note
            layer.note = f"rowwise over {layouts.world} ranks: {FLOAT}, as group scales forbid integer ones"
        if isinstance(module, HadamardLinear):
            module.in_features = layer.in_features
        return module


class PyquantExpertParallel(ParallelStyle):
    """Expert parallel for a QExperts: each rank holds some of the experts, whole, and multiplies the tokens of those.

    input_layouts     of hidden_states, top_k_index and top_k_weights; None is Replicate(): every rank has all tokens.
    output_layouts    of the result; None is Replicate().
    use_local_output  whether the result is the local tensor, or a DTensor.
    Every scheme gives the bits of one rank: results of experts are exchanged, and each token's are added in the order
    of its routing afterwards. Ranks hold as many experts, or one more. The router stays whole: every rank routes all
    tokens. Of a mesh of several dimensions the one named 'ep' is taken, or else 'tp'.
    Raises UnsupportedError for other modules (quantize_ and expose_linears_ make banks of transformers' classes), and
    for fewer experts than ranks.

    Example:
        >>> PyquantExpertParallel().output_layouts
        Replicate()
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = one_placement("input_layouts", input_layouts, Replicate())
        self.output_layouts = one_placement("output_layouts", output_layouts, Replicate())
        self.use_local_output = arguments.flag("use_local_output", use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dimension(device_mesh, (EXPERT_PARALLEL, TENSOR_PARALLEL))
        layouts = Layouts(mesh, self.input_layouts, self.output_layouts, self.use_local_output)
        if not isinstance(module, QExperts):
            got = f"a {type(module).__name__}"
            raise UnsupportedError(f"{got} for expert parallel; allowed: QExperts, which quantize_ makes of a bank")
        check_bank(module, layouts.world)
        SharedQExperts.take(module, layouts, self.src_data_rank)
        return module


def is_ours(module: nn.Module) -> bool:
    """Whether a module holds codes, or wraps one that does."""
    held = (LinearState, QExperts)
    return isinstance(module, held) or any(isinstance(m, held) for m in module.children())


def check_not_simulating(module: nn.Module) -> None:
    """Raise UnsupportedError for a layer in training, whose fake quantisation torch's styles would cut apart."""
    if hasattr(module, "fake_quantizers"):
        what = f"a {type(module).__name__}, whose rounding is trained"
        raise UnsupportedError(f"{what}, for tensor parallel; allowed: convert_ first, or data parallel training")


def check_whole(module: nn.Module) -> None:
    """Raise UnsupportedError for what is shared already, or is no layer that can be cut."""
    inner = getattr(module, "linear", None) if isinstance(module, (HadamardLinear, Reordered)) else module
    if isinstance(inner, Share):
        raise UnsupportedError(f"a layer that is shared already ({inner.share}): each is parallelised once")
    if isinstance(module, QExperts):
        raise UnsupportedError(
            "a bank of experts: its first matrix holds gates and ups one after the other, which a cut along its rows "
            "would part; PyquantExpertParallel gives each rank whole experts"
        )
    if isinstance(module, Reordered):
        raise UnsupportedError(
            "a layer whose columns stand in the order of their groups (desc_act), which reads inputs of every rank; "
            "allowed: checkpoints without it"
        )
    if not isinstance(module, (QLinear, QEmbedding, HadamardLinear)) or not isinstance(inner, LinearState):
        kind = type(module).__name__
        raise UnsupportedError(f"a {kind}; allowed: QLinear, QEmbedding, HadamardLinear around one, float layers")


def inner_of(module: Any) -> QLinear:
    """The QLinear that a module is, or wraps."""
    return cast(QLinear, module.linear if isinstance(module, HadamardLinear) else module)


def check_layer(layer: QLinear) -> None:
    """Raise where a layer has not all of its numbers."""
    if layer.missing is not None:
        raise ArgumentError("module", f"a layer without {layer.missing}", "one that is calibrated, or loaded")


def check_bank(bank: QExperts, world: int) -> None:
    """Raise where a bank is shared already, has fewer experts than there are ranks, or a layer without its numbers."""
    if bank.share:
        raise UnsupportedError(f"a bank that is shared already ({bank.share}): each is parallelised once")
    if bank.num_experts < world:
        raise UnsupportedError(f"{bank.num_experts} experts over {world} ranks; allowed: one a rank, or more")
    for layer in (layer for pair in bank.experts() for layer in pair):
        if isinstance(layer, Share):
            raise UnsupportedError(
                f"a bank with a layer of which ranks hold shares ({layer.share}): cut the bank alone"
            )
        if isinstance(layer, QLinear):
            check_layer(layer)


def check_columns(layer: QLinear, world: int, block: int) -> None:
    """Raise UnsupportedError where a cut along the inputs would part a group, a block, or two codes of one byte."""
    begin, end = bounds(layer.in_features, world, 0)
    each, scheme = end - begin, layer.scheme
    if world == 1:
        return
    units = {"a block of the Hadamard transform": block}
    if not scheme.is_float:
        units["a group of scales"] = scheme.weights.group_size or 1
        units["a byte of codes"] = scheme.weights.code_type.per_element
    for what, size in units.items():
        if each % size:
            raise UnsupportedError(
                f"{layer.in_features} inputs over {world} ranks are {each} each, and {what} has {size}; "
                f"allowed: a multiple of {size} on each rank"
            )
