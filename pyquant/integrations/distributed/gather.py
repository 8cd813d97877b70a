"""gather_quantized_: whole layers again, on every rank."""

from __future__ import annotations

from torch import nn

from pyquant.core import arguments
from pyquant.integrations.distributed.embedding import SharedQEmbedding
from pyquant.integrations.distributed.experts import SharedQExperts
from pyquant.integrations.distributed.layer import SharedQLinear
from pyquant.integrations.distributed.merged import ColwiseMergedLinear
from pyquant.nn.hadamard_linear import HadamardLinear
from pyquant.nn.qlinear import QLinear
from pyquant.nn.regroup import reunite, separate


def gather_quantized_(model: nn.Module) -> nn.Module:
    """Make every layer of which the ranks hold shares whole again, in place, with the bits that it had.

    model  nn.Module that PyquantColwise, PyquantRowwise, PyquantExpertParallel were applied to; every rank must call.
    ->     the model, for save_pretrained, dequantize_, or another number of ranks. Layouts of inputs and outputs are
           forgotten; the code around the layers must know again that they are whole. Float layers stay as they are.
    Raises ArgumentError for what is no module.

    Example:
        >>> gather_quantized_(nn.Sequential(nn.Linear(4, 2)))[0].out_features
        2
    """
    arguments.module("model", model)
    for module in list(model.modules()):
        if isinstance(module, (SharedQLinear, SharedQEmbedding, SharedQExperts)):
            if isinstance(module, ColwiseMergedLinear):
                separate(module)
            module.gather()
            if isinstance(module, QLinear):
                reunite(module)
    for module in model.modules():
        if isinstance(module, HadamardLinear):
            module.in_features, module.out_features = module.linear.in_features, module.linear.out_features
    return model
