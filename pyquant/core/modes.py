"""A model as in inference for a while, and the caller's random numbers untouched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and every module's own mode again afterwards."""
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in training:
            module.training = flag


@contextlib.contextmanager
def own_random_numbers(model: nn.Module) -> Iterator[None]:
    """What is drawn inside, on the CPU and on the GPUs of a model, does not change what the caller draws later."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices, key=str)):
        yield


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """What is made inside can be trained and saved for a backward pass, also where the caller is in inference mode;
    gradients are recorded if and only if they were."""
    with_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
        yield
