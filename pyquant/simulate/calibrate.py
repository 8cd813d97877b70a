"""calibrate_: ranges for the static tensors of a model with fake quantisation, from batches of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from pyquant.calibrate import Range, compute_range, run_calibration
from pyquant.simulate.fake_quantize import FakeQuantize, floating_point
from pyquant.simulate.targets import targets_of, unchanged


def calibrate_(
    model: nn.Module,
    data: Iterable[Any],
    num_batches: int = 16,
    *,
    batch_to_inputs: Callable[[Any], Any] | None = None,
    method: str | None = None,
    percentile: float | None = None,
    **run_options: Any,
) -> nn.Module:
    """Find the range of every static input and output of the simulating layers, in place.

    model            after insert_fake_quantize_ (or SelectiveQuantizer, prepare_qat_).
    data, num_batches, batch_to_inputs, run_options   as in pyquant.calibrate.run_calibration: exactly so many batches.
    method           None: the calibrator of each tensor's scheme; else this one for all.
    percentile       of method 'percentile'; None: the scheme's.
    ->               the model, calibrated. Models whose ranges all follow their data are not run at all.
    Transactional: on any exception every range is as before. Raises CalibrationError naming layers that saw no data,
    NonFiniteError naming layer and batch, ArgumentError.

    Example:
        >>> import torch
        >>> from pyquant.core.presets import W8A8
        >>> from pyquant.simulate.insert import insert_fake_quantize_
        >>> model = insert_fake_quantize_(nn.Sequential(nn.Linear(4, 2)), W8A8())
        >>> model = calibrate_(model, [torch.full((3, 4), 1.27)], 1)
        >>> round(model[0].input_fake_quant.scale.item(), 4)
        0.01
    """
    targets = targets_of(model, weights=False)
    with unchanged(targets, only_on_error=True):
        for target in targets:
            target.set_method(method, percentile)
        static = {target.name: target.fake for target in targets}
        set_ranges_from_data(static, model, data, num_batches, batch_to_inputs=batch_to_inputs, **run_options)
    return model


def set_ranges_from_data(
    fakes: Mapping[str, FakeQuantize], model: nn.Module, data: Iterable[Any], num_batches: int, **run_options: Any
) -> dict[str, Range]:
    """Run batches and set the range of each of these by the calibrator of its scheme; -> the ranges, by their names.

    Nothing is rounded meanwhile. Without any fake quantiser nothing is run: any data would do, and none is needed.
    """
    if not fakes:
        return {}
    with floating_point(model):
        collected = run_calibration(model, fakes, data, num_batches, **run_options)
    ranges = {name: compute_range(collected[name]["x"], fake.scheme) for name, fake in fakes.items()}
    for name, fake in fakes.items():  # all are known before the first is set
        fake.set_range(ranges[name])
    return ranges
