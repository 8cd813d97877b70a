"""Whether the weights of a float model can be changed in place, as improvers of float models do."""

from __future__ import annotations

import torch
from torch import nn

from pyquant.errors import ArgumentError


def check_writable(model: nn.Module) -> None:
    """Raise ArgumentError for a model with tensors of torch.inference_mode(), which torch lets nobody change outside
    of it, and which would be found after hours of calibration."""
    if torch.is_inference_mode_enabled():
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            got = f"a model that was made in torch.inference_mode() ({name})"
            raise ArgumentError("model", got, "copy.deepcopy(model), made outside of it: weights are changed in place")
