"""QuantizationCalibrator: data through a prepared model, ranges out of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch  # noqa: F401  (the example)
from torch import nn

from pyquant.calibrate import Comparison, Range, compare, histogram_methods, run_calibration, signed_histogram
from pyquant.calibrate.weights import weight_qparams
from pyquant.core import arguments
from pyquant.core.registry import data_calibrators
from pyquant.errors import ArgumentError
from pyquant.simulate.calibrate import set_ranges_from_data, targets_of, unchanged
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.float_model import floating_point

log = logging.getLogger("pyquant.ptq")

Ranges = dict[str, Range]


@dataclass(frozen=True)
class TensorHistogram:
    """The numbers of one tensor in bins (edges, counts) from its smallest to its largest, a Comparison for each
    method, and the (low, high) that the calibrated model has in use; None before calibration."""

    scheme: str
    edges: list[float]
    counts: list[float]
    methods: tuple[Comparison, ...]
    in_use: tuple[float, float] | None


class QuantizationCalibrator:
    """Finds the ranges of static tensors from data.

    torch_hist, verbose  accepted for old calls; the histogram is always the one of pyquant.calibrate. verbose=True
                         logs (INFO, logger 'pyquant.ptq') every range.

    Example:
        >>> from pyquant.ptq import SelectiveQuantizer
        >>> from pyquant.simulate.insert import convert_
        >>> model = SelectiveQuantizer().quantize_module(nn.Sequential(nn.Linear(4, 2)))
        >>> batches = [torch.linspace(-1, 1, 8).view(2, 4)] * 16
        >>> ranges = QuantizationCalibrator().calibrate_model(model, batches, method="max")
        >>> {name: found.high.item() for name, found in ranges.items()}
        {'0.input': 1.0}
        >>> type(convert_(model)[0]).__name__
        'QLinear'
    """

    def __init__(self, torch_hist: bool = True, verbose: bool = False) -> None:
        self.verbose = verbose

    def calibrate_model(
        self,
        model: nn.Module,
        calib_data_loader: Iterable[Any],
        method: str = "percentile",
        num_calib_batches: int = 16,
        percentile: float = 99.99,
        batch_to_inputs: Callable[[Any], Any] | None = None,
        verbose: bool = False,
        *,
        save_every: int | None = None,
        save_to: str | None = None,
        reduce: bool = False,
    ) -> Ranges:
        """Run exactly `num_calib_batches` batches and set every static range.

        model              after SelectiveQuantizer.quantize_module (or insert_fake_quantize_).
        calib_data_loader  yields batches: tensors, tuples (the first item is used), mappings (keyword arguments of
                           forward, labels left out).
        method             'max', 'percentile', 'entropy' or 'mse': for tensors with the calibrator 'histogram'; those
                           that name a calibrator of their own, 'max' included, keep it.
        percentile         in (0, 100], for method 'percentile'.
        batch_to_inputs    batch -> tensor, tuple of arguments, or mapping of keyword arguments.
        save_every, save_to, reduce   as in pyquant.calibrate.run_calibration: resume after an interruption; add up
                           the processes of torch.distributed.
        ->                 {'layer.input': Range} of everything that was calibrated.
        The model runs in eval mode without gradients and is otherwise unchanged; on any exception it is as before.
        Raises ArgumentError; CalibrationError naming layers that saw no data or how many batches there were;
        NonFiniteError naming layer and batch.
        """
        _check(method, percentile)
        arguments.flag("verbose", verbose)
        targets = targets_of(model)
        open_targets = [target for target in targets if target.fake.method_is_open]
        with unchanged(targets, only_on_error=True):
            for target in open_targets:
                target.set_method(method, percentile if method == "percentile" else 99.99)
            static = {t.name: t.fake for t in targets if t.tensor != "weight"}
            ranges = set_ranges_from_data(
                static,
                model,
                calib_data_loader,
                num_calib_batches,
                batch_to_inputs=batch_to_inputs,
                save_every=save_every,
                save_to=save_to,
                reduce=reduce,
            )
            for fake, layer in ((t.fake, t.layer) for t in open_targets if t.tensor == "weight"):
                matrix = layer.weight.detach().flatten(1)  # type: ignore[union-attr,operator]
                fake.set_qparams(*weight_qparams(matrix, fake.scheme))
        if verbose or self.verbose:
            for name, range_ in ranges.items():
                log.info("%s: [%g, %g]", name, range_.low.min().item(), range_.high.max().item())
        return ranges

    def compare(
        self,
        model: nn.Module,
        calib_data_loader: Iterable[Any],
        methods: Iterable[str] | None = None,
        num_calib_batches: int = 16,
        percentile: float = 99.99,
        batch_to_inputs: Callable[[Any], Any] | None = None,
    ) -> dict[str, dict[str, Comparison]]:
        """What every method makes of the same data, and what it costs; the model is not changed.

        -> {'layer.input': {method: Comparison}} for every static tensor: the range, and the errors of clipping and of
        rounding apart. methods: names; None: all that a histogram serves. Other arguments as in calibrate_model.

        Example:
            >>> from pyquant.ptq import SelectiveQuantizer
            >>> model = SelectiveQuantizer().quantize_module(nn.Sequential(nn.Linear(4, 2)))
            >>> found = QuantizationCalibrator().compare(model, [torch.linspace(-2, 2, 400).view(100, 4)] * 16)
            >>> sorted(found["0.input"])
            ['entropy', 'max', 'mse', 'percentile']
        """
        names = _names(methods)
        histograms = self.histograms(model, calib_data_loader, names, num_calib_batches, percentile, batch_to_inputs)
        return {name: dict(zip(names, seen.methods, strict=True)) for name, seen in histograms.items()}

    def histograms(
        self,
        model: nn.Module,
        calib_data_loader: Iterable[Any],
        methods: Iterable[str] | None = None,
        num_calib_batches: int = 16,
        percentile: float = 99.99,
        batch_to_inputs: Callable[[Any], Any] | None = None,
        *,
        bins: int = 200,
    ) -> dict[str, TensorHistogram]:
        """What every static tensor of a model holds, and every method's range for it; the model is not changed.

        bins  of each histogram. Other arguments as in compare.
        ->    {'layer.input': TensorHistogram}; pyquant.report.plot_calibration.plot_tensors draws them.

        Example:
            >>> from pyquant.ptq import SelectiveQuantizer
            >>> model = SelectiveQuantizer().quantize_module(nn.Sequential(nn.Linear(4, 2)))
            >>> data = [torch.linspace(-2, 2, 400).view(100, 4)] * 16
            >>> found = QuantizationCalibrator().histograms(model, data, bins=4)["0.input"]
            >>> found.edges, sum(found.counts), found.in_use
            ([-2.0, -1.0, 0.0, 1.0, 2.0], 6400.0, None)
        """
        names = _names(methods)
        for method in names:
            _check(method, percentile)
        targets = targets_of(model, weights=False)
        fakes = {target.name: target.fake for target in targets}
        if not targets:
            return {}
        with unchanged(targets), floating_point(model):
            for target in targets:
                target.set_method("percentile", percentile)  # a histogram serves every method
            data, count = calib_data_loader, num_calib_batches
            collected = run_calibration(model, fakes, data, count, batch_to_inputs=batch_to_inputs)
        result = {}
        for name, fake in fakes.items():
            statistics: Any = collected[name]["x"]
            records = compare(statistics, replace(fake.scheme, percentile=percentile), names)
            edges, counts = signed_histogram(statistics, bins)
            result[name] = TensorHistogram(str(fake.scheme), edges, counts, tuple(records), _range_of(fake))
        return result


def _names(methods: Iterable[str] | None) -> list[str]:
    return list(histogram_methods() if methods is None else arguments.iterable("methods", methods, "names of methods"))


def _check(method: object, percentile: object) -> None:
    arguments.one_of("method", method, data_calibrators())
    arguments.number("percentile", percentile, 0, 100, above=True)


def _range_of(fake: FakeQuantize) -> tuple[float, float] | None:
    """Smallest and largest number that the codes of a tensor mean."""
    if fake.follows or not fake.is_calibrated or fake.scale.numel() != 1:
        return None
    scale, zero_point = fake.qparams()
    zero, (low, high) = 0 if zero_point is None else int(zero_point), fake.scheme.code_range
    return float(scale) * (low - zero), float(scale) * (high - zero)


def apply_ranges_(model: nn.Module, ranges: Mapping[str, Range]) -> nn.Module:
    """Set the ranges {'layer.input': Range} that an earlier calibration of the same model and recipe found.

    Raises ArgumentError naming missing and unknown tensors; then nothing is changed."""
    targets = targets_of(model, weights=False)
    names = {target.name for target in targets}
    missing, unknown = sorted(names - set(ranges)), sorted(set(ranges) - names)
    if missing or unknown:
        problems = [f"no range for {', '.join(missing[:6])}"] if missing else []
        problems += [f"ranges of {', '.join(unknown[:6])}, which the model does not have"] if unknown else []
        raise ArgumentError("ranges", "; ".join(problems), "one range for every static tensor of the model")
    with unchanged(targets, only_on_error=True):
        for target in targets:
            target.fake.set_range(ranges[target.name])
    return model
