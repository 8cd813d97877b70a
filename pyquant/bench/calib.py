"""Calibration side by side: what collecting and searching cost, and which ranges come out on five known distributions.

The data follow numpy's documented generators, so anyone can compare with other tools on the same numbers. The optimum
that 'mse' is held to is found on the raw numbers, by two passes over a grid of ranges.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from pyquant.calibrate import EntropyCalibrator, HistogramStatistics, RangeStatistics, compute_range
from pyquant.calibrate.methods.mse import side_errors
from pyquant.calibrate.tails import SortedTails
from pyquant.core.scheme import TensorScheme
from pyquant.measure.environment import describe_environment
from pyquant.measure.exact import sqnr_db
from pyquant.measure.timing import default_clock, make_clock, time_interleaved
from pyquant.report.records.bench import CALIBRATION_DATA, AmaxRow, Bar, CalibReport, CollectRow, SearchRow, Unavailable

DATA: Final = CALIBRATION_DATA
METHODS: Final = (
    ("max", 99.99),
    ("percentile", 99.0),
    ("percentile", 99.9),
    ("percentile", 99.99),
    ("percentile", 99.999),
    ("entropy", 99.99),
    ("mse", 99.99),
)
HISTC: Final = "torch.histc of |x|, 2048 bins"
OURS: Final = "pyquant HistogramStatistics"
OURS_FIRST_BATCH: Final = "pyquant EntropyCalibrator"
MODELOPT: Final = "modelopt HistogramCalibrator"
FIRST_BATCH: Final = "entropy, first batch's bins"
MODELOPT_ENTROPY: Final = "modelopt entropy"
OPTIMUM: Final = "optimum on the raw numbers"
_UNTIMED: Final = (OPTIMUM, "percentile 99", "percentile 99.9", "percentile 99.999")
COLLECT_MS: Final = 0.5  # per 65 536 elements
ENTROPY_MS: Final = 24.0  # a hundredth of the 2.4 s that modelopt 0.47 needs for a tensor (one core)
MSE_WITHIN: Final = 0.005


def calib_data(kind: str, seed: int = 1234) -> Tensor:
    """Eight batches of 64 x 1024 numbers, float32.

    Example:
        >>> round(calib_data("relu_gaussian").abs().max().item(), 4)
        4.748
    """
    rng, shape = numpy.random.default_rng(seed), (8, 64, 1024)
    if kind == "laplace":
        x = rng.laplace(0.0, 1.0, shape)
    elif kind == "student_t3":
        x = rng.standard_t(3, shape)
    else:
        x = rng.standard_normal(shape)
        if kind == "outliers":  # one number in 10 000, 50 times as large; drawn after the normals
            x = numpy.where(rng.random(shape) < 1e-4, x * 50.0, x)
        elif kind == "relu_gaussian":
            x = numpy.maximum(x, 0.0)
    return torch.from_numpy(x.astype(numpy.float32))


def mse_optimum(x: Tensor, bits: int) -> float:
    """The amax with the least squared error of symmetric codes on the numbers themselves: 400 points, then 81."""
    tails, qmax = SortedTails(x.reshape(1, -1).abs()), 2 ** (bits - 1) - 1
    largest, best = float(x.abs().max()), 0.0
    for points in (torch.arange(1, 401, device="cpu") / 400, torch.arange(-40, 41, device="cpu") / 16000):
        amax = (best + largest * points.double())[None]
        amax = amax[:, amax[0] > 0]
        best = float(amax[0, side_errors(tails, amax / qmax, qmax)[0, :, -1].argmin()])
    return best


def sqnr(x: Tensor, amax: float, bits: int) -> float:
    """Signal to noise in dB of quantise and dequantise with symmetric codes."""
    qmax = 2 ** (bits - 1) - 1
    x, step = x.double(), amax / qmax
    return sqnr_db(x, torch.clamp(torch.round(x / step), -qmax, qmax) * step)


def run_calib_bench(count: int = 15, on_step: Callable[[str], None] | None = None) -> CalibReport:
    """Measures with torch's threads as they are: on one in CPU time, on several in wall time.

    count    interleaved rounds of collecting; searches take a third of them.
    on_step  called with what comes next.
    """
    tell = on_step or (lambda text: None)
    tell("collect")
    unavailable: list[Unavailable] = []
    collect = _collect(count, unavailable)
    statistics = {kind: observed(calib_data(kind)) for kind in DATA}
    classical = {kind: _fed(EntropyCalibrator(), calib_data(kind)) for kind in DATA}
    search, rows = [], []
    amax: dict[tuple[int, str], list[float]] = {}
    times: dict[tuple[int, str], dict[str, float]] = {}
    for bits in (8, 4):
        for name, finders in _finders(bits, statistics, classical).items():
            tell(f"int{bits} {name}")
            at = bits, name
            if name == MODELOPT_ENTROPY:
                amax[at], times[at] = _once(finders)
            else:
                amax[at] = [float(find()) for find in finders.values()]
                if name not in _UNTIMED:
                    times[at] = _search(finders, max(count // 3, 3))
            noise = [sqnr(calib_data(kind), a, bits) for kind, a in zip(DATA, amax[at], strict=True)]
            rows.append(AmaxRow(bits, name, amax[at], noise))
            if at in times:
                slowest = max(times[at], key=times[at].__getitem__)
                search.append(SearchRow(name, bits, times[at][slowest], slowest))
    pairs = [pair for bits in (8, 4) for pair in zip(amax[bits, "mse"], amax[bits, OPTIMUM], strict=True)]
    bars = [
        Bar(
            "collect a histogram of 65 536 numbers",
            COLLECT_MS,
            next(row.median_ms for row in collect if row.candidate == OURS),
            "<=",
            "ms",
        ),
        Bar(
            "entropy search, slowest data set",
            ENTROPY_MS,
            max(row.slowest_ms for row in search if row.method == "entropy"),
            "<=",
            "ms",
        ),
        Bar(
            "mse: amax from the optimum on the raw numbers", MSE_WITHIN, max(abs(a / b - 1) for a, b in pairs), "<=", ""
        ),
    ]
    if (8, MODELOPT_ENTROPY) in amax:
        faster = min(
            times[bits, MODELOPT_ENTROPY][kind] / max(times[bits, "entropy"][kind], times[bits, FIRST_BATCH][kind])
            for bits in (8, 4)
            for kind in DATA
        )
        apart = max(map(_bins_apart, DATA, amax[8, FIRST_BATCH], amax[8, MODELOPT_ENTROPY]))
        bars += [
            Bar("entropy search against modelopt's in this run, least of all data sets", 100.0, faster),
            Bar(f"{FIRST_BATCH}, int8: amax from modelopt's in this run", 1.0, apart, "<=", "bins"),
        ]
    notes = [
        "collect: a batch of 64 x 1024 float32 normals into warm statistics; ratio against torch.histc of the same run",
        "data: numpy default_rng(1234), 8 batches of 64 x 1024; symmetric codes, narrow range; SQNR over all numbers",
        "the entropy bar is a hundredth of the 2.4 s that the search of modelopt 0.47 takes for a tensor",
    ]
    environment = describe_environment("cpu", clock=_clock_name())
    return CalibReport(environment, collect, search, rows, bars, unavailable, notes)


def _finders(
    bits: int, statistics: Mapping[str, HistogramStatistics], classical: Mapping[str, EntropyCalibrator]
) -> dict[str, dict[str, Callable[[], Any]]]:
    """{method: {data set: what finds its amax}}, in the order of the report."""
    found: dict[str, dict[str, Callable[[], Any]]] = {}
    for method, percentile in METHODS:
        scheme = TensorScheme(bits=bits, calibrator=method, percentile=percentile)
        name = f"{method} {percentile:g}" if method == "percentile" else method
        found[name] = {kind: partial(_amax, held, scheme) for kind, held in statistics.items()}
        if method == "entropy":
            found[FIRST_BATCH] = {kind: partial(held.compute_amax, bits=bits) for kind, held in classical.items()}
            if (theirs := _modelopt()) is not None:
                held = {kind: _fed(theirs(num_bits=bits, torch_hist=True), calib_data(kind)) for kind in DATA}
                found[MODELOPT_ENTROPY] = {kind: partial(one.compute_amax, "entropy") for kind, one in held.items()}
        if method == "mse":
            found[OPTIMUM] = {kind: partial(mse_optimum, calib_data(kind), bits) for kind in DATA}
    return found


def _amax(statistics: HistogramStatistics, scheme: TensorScheme) -> Tensor:
    return compute_range(statistics, scheme).amax


def _modelopt() -> Any:
    """modelopt's collector, None where it is not installed."""
    try:
        from modelopt.torch.quantization.calib import HistogramCalibrator
    except ImportError:
        return None
    return HistogramCalibrator


def _clock_name() -> str:
    return default_clock(torch.get_num_threads())


def observed(batches: Tensor) -> HistogramStatistics:
    """The statistics of some batches."""
    statistics = HistogramStatistics()
    for batch in batches:
        statistics.observe(batch)
    return statistics


def _fed(calibrator: Any, batches: Tensor) -> Any:
    for batch in batches:
        calibrator.collect(batch)
    return calibrator


def _bins_apart(kind: str, a: float, b: float) -> float:
    """How many bins of the first batch lie between two ranges."""
    return abs(a - b) * 2048 / float(calib_data(kind)[0].abs().max())


def _collect(rounds: int, unavailable: list[Unavailable]) -> list[CollectRow]:
    x = calib_data("gaussian")[0]
    statistics, ranges, classical = observed(x[None]), RangeStatistics(), _fed(EntropyCalibrator(), x[None])
    candidates: dict[str, Callable[[], Any]] = {
        HISTC: lambda: torch.histc(x.abs(), 2048, 0, 5.0),
        OURS: lambda: statistics.observe(x),
        OURS_FIRST_BATCH: lambda: classical.collect(x),
        "pyquant RangeStatistics": lambda: ranges.observe(x),
        "torch.aminmax": lambda: torch.aminmax(x),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao announces its end at every construction
        candidates |= _torch_ao(x)
        if (theirs := _modelopt()) is None:
            unavailable.append(Unavailable(MODELOPT, "modelopt is not installed"))
        else:
            candidates[MODELOPT] = partial(theirs(num_bits=8, torch_hist=True).collect, x)
        timings = time_interleaved(candidates, clock=make_clock(_clock_name()), rounds=rounds)
    return [
        CollectRow(
            name,
            name.startswith("pyquant"),
            timings.median_us(name) / 1e3,
            timings.ratio(HISTC, name),
            timings.spread(name),
        )
        for name in candidates
    ]


def _torch_ao(x: Tensor) -> dict[str, Callable[[], Any]]:
    from torch.ao.quantization import HistogramObserver, MinMaxObserver

    observers: dict[str, Callable[[], Any]] = {}
    for cls in (HistogramObserver, MinMaxObserver):
        observers[f"torch.ao {cls.__name__}"] = partial(cls(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric), x)
    return observers


def _search(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of a range for each data set."""
    timings = time_interleaved(candidates, clock=make_clock(_clock_name()), rounds=rounds, warm_calls=1)
    return {kind: timings.median_us(kind) / 1e3 for kind in candidates}


def _once(finders: Mapping[str, Callable[[], Any]]) -> tuple[list[float], dict[str, float]]:
    """amax and milliseconds of one search each: they take seconds."""
    clock, found, times = make_clock(_clock_name()), list[Any](), {}
    for kind, find in finders.items():
        times[kind] = clock.seconds(lambda find=find: found.append(find()), 1) * 1e3  # type: ignore[misc]
    return [float(amax) for amax in found], times
