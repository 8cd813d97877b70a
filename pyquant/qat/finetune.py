"""A plain training loop for those who have none: quantisation-aware fine-tuning with the rules of QATRecipe."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.qat.guards import check_trainable
from pyquant.qat.learned import LearnedFakeQuantize
from pyquant.qat.recipe import OPTIMIZERS, QATRecipe
from pyquant.recipe import QatParams, Recipe
from pyquant.recipe.sections import rescales

_LOOKS: Final = 64  # a look at all weights costs as much as reading them, so there is one in so many steps
_SKIPS: Final = 32  # steps left out in a row: 2^32 less than the scale they began with, so the scale is not to blame
_AMP: Final = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def param_groups(model: nn.Module, weight_decay: float = 0.0, range_lr: float = 1.0) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser: weights with decay; learned ranges, biases and norms without.

    weight_decay  of parameters with two or more dimensions.
    range_lr      learning rate of learned scales as a share of that of the weights (kept as 'lr_share' of the group).

    Example:
        >>> [len(group["params"]) for group in param_groups(nn.Linear(2, 2), 0.1)]
        [1, 1]
    """
    ranges = [m.scale for m in model.modules() if isinstance(m, LearnedFakeQuantize) and m.scale.requires_grad]
    known = {id(p) for p in ranges}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay, "lr_share": 1.0},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0, "lr_share": 1.0},
    ]
    if ranges:
        groups.append({"params": ranges, "weight_decay": 0.0, "lr_share": range_lr})
    return groups


def finetune(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    loader: Iterable[Any],
    *,
    lr: float,
    steps: int | None = None,
    epochs: int = 1,
    recipe: QATRecipe | Recipe | str | os.PathLike[str] | None = None,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    range_lr: float = 1.0,
    autocast: torch.dtype | None = None,
    on_step: Callable[[int, float], Any] | None = None,
) -> list[float]:
    """Train a prepared model: momentum SGD, Adam, AdamW or Muon, warm-up and half cosine, gradient clipping, autocast.

    loss_fn   fn(model, batch) -> scalar loss; moves the batch to the model's device. `distillation` makes one.
    loader    batches; iterated repeatedly until the steps are done.
    lr        peak learning rate (QATRecipe.peak_lr computes it from that of the training).
    steps     optimiser steps; None: epochs * len(loader).
    recipe    warm-up, final rate, clipping and optimiser; None: QATRecipe(). Its `optimizer` None means SGD here;
              a Recipe or the path of its file: optimizer, momentum, grad_clip and amp of its section qat;
              'muon' is torch.optim.Muon for the weights of Linear layers and AdamW for the rest, both with rate `lr`.
    momentum  of SGD and of Muon; None: what the file says, or 0.9.
    autocast  torch.bfloat16 or torch.float16 (which scales the loss); parameters and scales stay float32. None: what
              the file says, or none.
    range_lr  learning rate of learned ranges, as a share of `lr`.
    on_step   fn(step, loss), called with unclipped gradients in place, before the update: QATMonitor is one.
    ->        the loss of every step. The model is in training mode afterwards.
    Raises ArgumentError for wrong arguments, an empty loader, and a loss that is not finite (naming the step);
    NonFiniteError naming the parameter whose gradient is not finite and the step, before its weights are changed (where
    nothing is clipped: the parameter that is not finite, within 64 steps and at the end). With float16 such a step is
    left out and the loss scaled by less; NonFiniteError after 32 of them in a row.

    Example:
        >>> from pyquant import W8A8Dynamic, prepare_qat_
        >>> model = prepare_qat_(nn.Sequential(nn.Linear(4, 1)), W8A8Dynamic())
        >>> batches = [torch.ones(8, 4)]
        >>> losses = finetune(model, lambda m, x: (m(x) - 2).square().mean(), batches, lr=0.05, steps=20)
        >>> losses[-1] < losses[0]
        True
    """
    arguments.module("model", model)
    arguments.function("loss_fn", loss_fn, "(model, batch) -> loss", optional=False)
    arguments.function("on_step", on_step, "(step, loss)")
    arguments.iterable("loader", loader)
    lr, weight_decay = arguments.number("lr", lr, 0), arguments.number("weight_decay", weight_decay, 0)
    range_lr = arguments.number("range_lr", range_lr, 0)
    if isinstance(recipe, (str, os.PathLike)):
        recipe = Recipe.load(recipe)
    if isinstance(recipe, Recipe):
        check_trainable(recipe.ptq_only)
        params = recipe.qat or QatParams()
        recipe = QATRecipe(optimizer=params.optimizer, grad_clip=params.grad_clip)
        momentum = params.momentum if momentum is None else momentum
        autocast = _AMP[params.amp] if autocast is None else autocast
    recipe = QATRecipe() if recipe is None else recipe
    if not isinstance(recipe, QATRecipe):
        raise ArgumentError("recipe", arguments.shown(recipe), "a QATRecipe, a Recipe, the path of its file, or None")
    momentum = 0.9 if momentum is None else arguments.number("momentum", momentum, 0)
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ArgumentError("autocast", autocast, "None, torch.bfloat16 or torch.float16")
    steps = _steps(steps, arguments.whole("epochs", epochs, 1), loader)
    first = next(model.parameters(), None)
    if first is None:
        raise ArgumentError("model", f"a {type(model).__name__} without parameters", "a model to train")
    device = first.device.type
    groups = param_groups(model, weight_decay, range_lr)
    names = {id(p): name for name, p in model.named_parameters()}
    trained = {names[id(p)]: p for group in groups for p in group["params"]}
    optimizers = _optimizers(model, groups, recipe.optimizer, lr, momentum)
    scaler = torch.amp.GradScaler(device, enabled=autocast is torch.float16)
    model.train()
    losses: list[float] = []
    skips = 0
    for step, batch in enumerate(_repeat(loader, steps)):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_share"] * recipe.lr_factor(step, steps)
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentError("loss_fn", f"a function that returned {arguments.shown(loss)}", "a loss: one number")
        if not loss.requires_grad:
            got = "a loss that no parameter has a part in"
            raise ArgumentError("loss_fn", got, "a loss of the model's results; quantised layers hold codes")
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise ArgumentError("loss_fn", f"a loss of {losses[-1]} in step {step}", "finite losses: try a smaller lr")
        if on_step is not None:
            on_step(step, losses[-1])
        spoilt = None
        if recipe.grad_clip:
            norm = nn.utils.get_total_norm([p.grad for p in trained.values() if p.grad is not None])
            if not _is_finite(norm):  # finite gradients may be too large for their norm, too
                spoilt = _first_not_finite({name: p.grad for name, p in trained.items()})
            if spoilt is not None and not scaler.is_enabled():
                got = f"a gradient of '{spoilt}' that is not finite in step {step}"
                allowed = "finite gradients: look for x / 0, sqrt(0) and log(0) in it, or try a smaller lr"
                raise NonFiniteError("loss_fn", got, allowed)
            nn.utils.clip_grads_with_norm_(trained.values(), recipe.grad_clip, norm)
        for optimizer in optimizers if spoilt is None else ():
            scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skips = skips + 1 if scaler.get_scale() < scale else 0
        if skips == _SKIPS:
            got = f"gradients that are not finite in {skips} steps one after another, up to step {step}"
            raise NonFiniteError("loss_fn", got, f"finite gradients; by {scale:.1g} the loss is scaled already")
        if step % _LOOKS == _LOOKS - 1 or step == steps - 1:
            spoilt = _first_not_finite(trained)
            if spoilt is not None:
                got = f"'{spoilt}', which is not finite after step {step}"
                raise NonFiniteError("model", got, "finite weights: try a smaller lr, and clipped gradients")
    return losses


def _first_not_finite(tensors: Mapping[str, Tensor | None]) -> str | None:
    """The name of the first tensor that holds NaN or infinity."""
    return next((name for name, tensor in tensors.items() if tensor is not None and not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    found = tensor.detach().isfinite().all()
    return bool(found.full_tensor() if hasattr(found, "full_tensor") else found)  # of a DTensor: on every process


def _steps(steps: int | None, epochs: int, loader: Iterable[Any]) -> int:
    if steps is not None:
        return arguments.whole("steps", steps, 0)
    try:
        return epochs * len(loader)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError("steps", "None", "a number of steps, as the loader has no length") from None


def _optimizers(
    model: nn.Module, groups: list[dict[str, Any]], name: str | None, lr: float, momentum: float
) -> list[torch.optim.Optimizer]:
    """The optimisers of a recipe over all groups; an empty list of parameters gets none."""
    if name is not None and rescales(name):
        return [getattr(torch.optim, OPTIMIZERS[name])(groups, lr=lr)]
    if name != "muon":
        return [torch.optim.SGD(groups, lr=lr, momentum=momentum)]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}  # tied heads: rows are looked up
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - tables
    first, *rest = groups
    matrices = [p for p in first["params"] if id(p) in linear]
    others = [{**first, "params": [p for p in first["params"] if id(p) not in linear]}, *rest]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        # the adjusted rate moves a matrix about as far as AdamW's of the same learning rate
        how: dict[str, Any] = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon([{**first, "params": matrices}], lr, **how))
    if any(group["params"] for group in others):
        optimizers.append(torch.optim.AdamW(others, lr=lr))
    return optimizers


def _repeat(loader: Iterable[Any], steps: int) -> Iterable[Any]:
    done = 0
    while done < steps:
        before = done
        for batch in loader:
            yield batch
            done += 1
            if done == steps:
                return
        if done == before:
            raise ArgumentError("loader", f"no batch after {done} steps", "batches at every iteration over it")
