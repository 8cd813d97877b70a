"""error_report: the quantised model compared with the float one, layer by layer, on the user's data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant import ops
from pyquant.calibrate.padding import counted, left_out
from pyquant.calibrate.run import batch_named, inputs_of, too_few
from pyquant.core import arguments
from pyquant.core.modes import evaluating
from pyquant.core.patches import Patches
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.mixed_precision.choices.watch import hooked
from pyquant.mixed_precision.loss.scorers.layers import rounded_input
from pyquant.nn.experts import QExperts
from pyquant.nn.flow import first_given, first_tensor
from pyquant.nn.forms import expose_reversibly
from pyquant.nn.linear_call import LinearCall
from pyquant.nn.undo import Undo
from pyquant.report.records.errors import ErrorReport, TensorError
from pyquant.simulate.layer import SimulatedLayer

BINS: Final = 128
_FINE: Final = 8192  # a power of two
_Qparams = tuple[Tensor, Tensor | None]


def error_report(
    model: nn.Module,
    reference: nn.Module,
    data: Iterable[Any],
    num_batches: int = 16,
    *,
    batch_to_inputs: Callable[[Any], Any] | None = None,
) -> ErrorReport:
    """Errors of weights, inputs and results of every quantised layer, on data: where a model loses, and why.

    model      quantised (quantize_, convert_, load_pretrained) or simulating (SelectiveQuantizer, calibrated).
    reference  the float model that it was made of, another object; layers are matched by name, those of attention,
               recurrent layers, Conv1D and experts by the names that quantize_ gives them (expose_linears_).
    data       at least `num_batches` batches, as QuantizationCalibrator.calibrate_model takes them.
    ->         ErrorReport. Of each layer: 'weight' and 'input' (rounding and clipping of one tensor), 'alone' (the
               layer fed by the float model) and 'output' (fed by the quantised one: not of experts, which see other
               tokens there); of the model the row of name ''.
               `report.skipped` says which layers have no counterpart, or compute more (an activation, codes).
    Both models run in eval mode without gradients and are otherwise unchanged. Sums are float64.
    Raises ArgumentError; CalibrationError where the data end too early, or a model raises over a batch.

    Example:
        >>> import copy, pyquant
        >>> _ = torch.manual_seed(0)
        >>> floats = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        >>> model = pyquant.quantize_(copy.deepcopy(floats), pyquant.W8A8Dynamic())
        >>> report = error_report(model, floats, [torch.randn(64, 16)], num_batches=1)
        >>> [(row.layer, row.tensor) for row in report.rows][:4]
        [('0', 'weight'), ('0', 'input'), ('0', 'alone'), ('0', 'output')]
        >>> report.of("").sqnr_db > 30, report.of("0", "input").clip_share
        (True, 0.0)
    """
    for name, given in (("model", model), ("reference", reference)):
        arguments.module(name, given)
    if model is reference:
        raise ArgumentError("reference", "the model itself", "the float model, another object")
    arguments.whole("num_batches", num_batches, 1)
    arguments.iterable("data", data)
    undo: list[Undo] = []
    try:
        expose_reversibly(reference, None, undo)  # its layers then have the names and shapes that quantize_ gave them
        return _report(model, reference, data, num_batches, batch_to_inputs)
    finally:
        for step in reversed(undo):
            step()


def _report(
    model: nn.Module,
    reference: nn.Module,
    data: Iterable[Any],
    num_batches: int,
    batch_to_inputs: Callable[[Any], Any] | None,
) -> ErrorReport:
    skipped: dict[str, str] = {}
    pairs = _pairs(model, reference, skipped)
    if not pairs:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:4]) or "no quantised layer"
        raise ArgumentError("model", why, "a quantised or simulating model, and the float model with the same names")
    sums: _AllSums = {}
    moved = _moved(pairs)
    compared = [pair for pair in pairs if pair.name not in moved]
    for pair in compared:
        _add_weight(sums, pair)
    called: set[str] = set()
    other: set[str] = set()
    to_inputs, done = inputs_of(reference, batch_to_inputs), 0
    with evaluating(model), evaluating(reference), torch.no_grad():
        for _, batch in zip(range(num_batches), data, strict=False):
            args, kwargs, padding = to_inputs(batch)
            with batch_named(done), left_out(padding):
                _add_batch(sums, compared, called, other, model, reference, args, kwargs)
            done += 1
    if done < num_batches:
        raise too_few(num_batches, done)
    for pair in pairs:
        if pair.name in moved:
            skipped[pair.name] = (
                "its weights are not the float layer's, rounded: smoothing, equalisation, a rotation or training moved "
                "factors between it and its neighbours; the model's own results are compared"
            )
        elif pair.name not in called:
            skipped[pair.name] = "the float model did not call it as a layer: only its weight is compared"
        elif pair.computes_more:
            skipped[pair.name] = f"it {pair.computes_more}: its result is not the float layer's"
        elif pair.bank and pair.bank not in skipped:
            skipped[pair.bank] = "its experts see other tokens in the quantised model: their 'output' is not compared"
    for name in sorted(other):
        skipped[name or "the model"] = "some results have another shape in the quantised model: they are not compared"
    rows = [
        sums[key].row(*key, scheme)
        for name, scheme in [*((p.name, p.scheme) for p in pairs), ("", None)]
        for key in ((name, tensor) for tensor in ("weight", "input", "alone", "output"))
        if key in sums
    ]
    return ErrorReport(type(model).__name__, done, tuple(rows), skipped)


@dataclass
class _Pair:
    """A quantised layer and its float original."""

    name: str
    layer: Any
    original: Any
    bank: str = ""  # of experts that it belongs to: its rows are those of other tokens in the other model

    @property
    def scheme(self) -> QScheme:
        return self.layer.scheme  # type: ignore[no-any-return]

    def counted(self, x: Tensor) -> Tensor:
        """What counts of an input or a result: all of an image, else what is no padding."""
        return x if hasattr(self.layer, "patches") else counted(x)

    @property
    def computes_more(self) -> str:
        """What the layer does that its original does not; '' for nothing."""
        if self.scheme.outputs is not None and not isinstance(self.layer, SimulatedLayer):
            return "gives codes"
        activation = getattr(self.layer, "activation", "none")
        return "" if activation == "none" else f"has the activation {activation} in it"


def _pairs(model: nn.Module, reference: nn.Module, skipped: dict[str, str]) -> list[_Pair]:
    originals, pairs = dict(reference.named_modules()), []
    banks = [name for name, module in model.named_modules() if isinstance(module, QExperts)]
    for name, layer in model.named_modules():
        if not isinstance(layer, (LinearCall, SimulatedLayer)) or layer.scheme.is_float:  # type: ignore[union-attr]
            continue
        original = originals.get(name)
        weight = getattr(original, "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            skipped[name] = "the reference has no float layer of this name"
        elif _matrix(original, weight).shape != _quantised_weight(layer).shape:
            skipped[name] = f"the reference's weights are {list(weight.shape)}"
        else:
            bank = next((bank for bank in banks if name.startswith(f"{bank}.")), "")
            pairs.append(_Pair(name, layer, original, bank))
    return pairs


def _matrix(layer: Any, weight: Tensor) -> Tensor:
    """A float weight as the matrix [N, K] that is quantised."""
    return Patches.of(layer).matrix(weight.detach()) if weight.dim() == 4 else weight.detach()


def _quantised_weight(layer: Any) -> Tensor:
    if isinstance(layer, LinearCall):
        return layer.dequantised_weight()
    with torch.no_grad():
        rounded: Tensor = layer.weight_fake_quant(_matrix(layer, layer.weight).float())
    return rounded


def _weight_ranges(pair: _Pair, original: Tensor) -> _Qparams:
    if isinstance(pair.layer, LinearCall):
        return pair.layer.weight_scale_, pair.layer.weight_zero_point_
    return pair.layer.weight_fake_quant.qparams(original)  # type: ignore[no-any-return]


def _add_weight(sums: _AllSums, pair: _Pair) -> None:
    original, s = _matrix(pair.original, pair.original.weight).float(), pair.scheme.weights
    qparams = _weight_ranges(pair, original)
    per = s.group_size or (original.numel() if qparams[0].numel() == 1 else original.shape[1])
    entry = _entry(sums, pair.name, "weight")
    entry.add(_quantised_weight(pair.layer), original)
    entry.clipped = _clipped(original, s, qparams, per)


_OFF = 0.06  # of factors: beyond what rounding makes
_MUCH = 0.5  # GPTQ's corrected targets are up to 0.27 smaller, all of a layer alike
_EXPLAINED = 0.2  # of a change by factors that differ, beyond chance: of codes that GPTQ chose up to 0.14


def _moved(pairs: Sequence[_Pair]) -> set[str]:
    """Layers whose weights smoothing, equalisation, a rotation or training changed beyond rounding and GPTQ. Factors
    move from one layer to another: where some surely did, those that may have are taken for the others."""
    how = {pair.name: _how_moved(pair) for pair in pairs}
    least = 1 if 2 in how.values() else 2
    return {name for name, moved in how.items() if moved >= least}


def _how_moved(pair: _Pair) -> int:
    """Whether rows or columns of the quantised weights are the original's times other numbers than those of the
    original, rounded and clipped by the same scales, are: 2 surely, 1 maybe, 0 not. By the factors of least squares:
    how far they are from 1 in the mean over the squares of the weights, and what share of the change they are less the
    one for all."""
    original, ours = _matrix(pair.original, pair.original.weight).float(), _quantised_weight(pair.layer).float()
    scale, zero_point = _weight_ranges(pair, original)
    s = pair.scheme.weights
    one = scale.numel() == 1  # layers in integers hold one for each channel, whatever the scheme says
    granularity = "per_tensor" if one else "per_channel" if scale.numel() == original.shape[0] else s.granularity
    how = (granularity, s.group_size or 0 if granularity == "per_group" else 0)
    codes = ops.quantize(original.contiguous(), scale, zero_point, *how, *s.code_range)
    change = ours - ops.dequantize(codes, scale, zero_point, *how)
    squares, changed = original.square(), float(change.square().sum())
    whole = float(squares.sum())
    if whole == 0:
        return 0
    common = float((original * change).sum()) / whole
    if abs(common) > _MUCH:
        return 2
    off = 0.0
    for dim in (0, 1):
        along, of = (original * change).sum(dim), squares.sum(dim)
        off = max(off, float(along.abs().sum()) / whole)
        differ = along - common * of
        chance = 1 / change.shape[dim]  # what one factor for so many numbers explains of any change
        explained = float((differ.square() / of.clamp_min(torch.finfo(of.dtype).tiny)).sum())
        if float(differ.abs().sum()) > _OFF * whole and explained > (chance + (1 - chance) * _EXPLAINED) * changed:
            return 2
    return int(off > _OFF)


def _add_batch(
    sums: _AllSums,
    pairs: list[_Pair],
    called: set[str],
    other: set[str],
    model: nn.Module,
    reference: nn.Module,
    args: Any,
    kwargs: Any,
) -> None:
    """One batch through both models; what the float layers gave is held until the quantised ones have run.

    called, other  receive the names of layers that the float model called, and of those (and '' for the model) whose
                   results have another shape in the quantised one.
    """
    given: dict[str, list[Tensor]] = {}

    def originally(pair: _Pair) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], keywords: Any, y: Any) -> None:
            x = first_given(inputs, keywords)
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                called.add(pair.name)
                given.setdefault(pair.name, []).append(y)
                _add_input(sums, pair, x)
                if not pair.computes_more:
                    _entry(sums, pair.name, "alone").add(pair.counted(pair.layer(x)), pair.counted(y))

        return hook

    def quantised(pair: _Pair) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, keywords: Any, y: Any) -> None:
            references = given.get(pair.name)
            if references and isinstance(y, Tensor) and not pair.computes_more and not pair.bank:
                want = references.pop(0)
                if want.shape == y.shape:
                    _entry(sums, pair.name, "output").add(pair.counted(y), pair.counted(want))
                else:
                    other.add(pair.name)

        return hook

    with hooked([(pair.original, originally(pair)) for pair in pairs]):
        want = first_tensor(reference(*args, **kwargs))
    with hooked([(pair.layer, quantised(pair)) for pair in pairs]):
        got = first_tensor(model(*args, **kwargs))
    if want is not None and got is not None and want.shape == got.shape:
        _entry(sums, "", "output").add(counted(got), counted(want))
    elif want is not None and got is not None:
        other.add("")


def _add_input(sums: _AllSums, pair: _Pair, x: Tensor) -> None:
    """What the layer's codes make of the float model's input."""
    s, layer = pair.scheme.inputs, pair.layer
    if s is None:
        return
    entry = _entry(sums, pair.name, "input")
    fake = layer.input_fake_quant if isinstance(layer, SimulatedLayer) else None
    if fake is None:
        y = rounded_input(layer, x)[0]
    elif s.dynamic and x.dim() > 2 and hasattr(layer, "patches"):  # one range an image
        y = fake(x.reshape(x.shape[0] if x.dim() == 4 else 1, -1)).reshape(x.shape)
    else:
        y = fake(x)
    y, x = pair.counted(y), pair.counted(x)
    entry.add(y, x)
    if not s.dynamic:
        qparams = (layer.input_scale_, layer.input_zero_point_) if fake is None else fake.qparams()
        entry.clipped += _clipped(x, s, qparams, x.numel())


def _clipped(x: Tensor, s: TensorScheme, qparams: _Qparams, per: int) -> int:
    """How many numbers lie beyond the codes; `per` neighbours share a scale."""
    if x.numel() == 0:
        return 0
    scale, zero_point = qparams
    codes = (x.detach().double().reshape(-1, per) / scale.double().reshape(-1, 1)).round()
    offset = 0 if zero_point is None else zero_point.reshape(-1, 1)
    low, high = s.code_range
    return int(((codes + offset < low) | (codes + offset > high)).sum())


@dataclass
class _Sums:
    """What adds up over batches, in float64."""

    count: int = 0
    absolute: float = 0.0
    square: float = 0.0
    largest: float = 0.0
    signal: float = 0.0
    own: float = 0.0
    product: float = 0.0
    clipped: int = -1
    ends: tuple[float, float] = (math.inf, -math.inf)  # of the original
    exponent: int = -150  # the bins lie between -2^exponent and 2^exponent
    bins: Tensor | None = None  # float64 [2, _FINE]: counts of the original and of the quantised

    def add(self, quantised: Tensor, original: Tensor) -> None:
        a, b = quantised.detach().double().flatten(), original.detach().double().flatten()
        if b.numel() == 0:
            return
        error = (a - b).abs()
        self.count += b.numel()
        self.absolute += float(error.sum())
        self.square += float(error.square().sum())
        self.largest = max(self.largest, float(error.max()))
        self.signal += float(b.square().sum())
        self.own += float(a.square().sum())
        self.product += float(a @ b)
        if self.clipped < 0:
            self._histogram(a, b)

    def _histogram(self, a: Tensor, b: Tensor) -> None:
        """Counts of both in fine bins, whose width doubles where a batch is larger: no order of batches shows."""
        low, high = (float(end) for end in b.aminmax())
        amax = max(-low, high, float(a.abs().max()))
        if not math.isfinite(amax):
            return  # row() names it
        self.ends = min(self.ends[0], low), max(self.ends[1], high)
        exponent = max(self.exponent, math.frexp(amax)[1])
        if self.bins is None:
            self.bins = torch.zeros(2, _FINE, dtype=torch.float64, device=b.device)
            self.exponent = exponent
        while self.exponent < exponent:
            pairs = self.bins.view(2, -1, 2).sum(-1)
            self.bins = nn.functional.pad(pairs, (_FINE // 4, _FINE // 4))
            self.exponent += 1
        per_unit = math.ldexp(_FINE / 2, -self.exponent)
        for counts, numbers in zip(self.bins, (b, a), strict=True):
            at = (numbers * per_unit).floor().long() + _FINE // 2
            counts += torch.bincount(at.clamp(0, _FINE - 1), minlength=_FINE)

    def row(self, layer: str, tensor: str, scheme: QScheme | None) -> TensorError:
        if math.isnan(self.square) or math.isinf(self.signal):
            of = f"{tensor} of {layer}" if layer else tensor
            raise NonFiniteError("data", f"batches under which {of} is NaN or infinite", "finite ones")
        n = max(self.count, 1)
        ratio = self.signal / self.square if self.square else math.inf
        norms = math.sqrt(self.own * self.signal)
        of_one = {"weight": "weights", "input": "inputs"}.get(tensor)
        return TensorError(
            layer,
            tensor,
            "" if scheme is None else str(getattr(scheme, of_one) if of_one else scheme),
            self.count,
            self.absolute / n,
            self.square / n,
            self.largest,
            10 * math.log10(ratio) if 0 < ratio < math.inf else (math.inf if ratio else -math.inf),
            self.product / norms if norms else 1.0,
            self.clipped / n if of_one else None,
            None if of_one else self._kl(),
        )

    def _kl(self) -> float | None:
        """Of BINS equal bins from the smallest to the largest number of the original, the outer ones open."""
        if self.bins is None:
            return None
        device, width = self.bins.device, math.ldexp(2 / _FINE, self.exponent)
        edges = torch.linspace(*self.ends, BINS + 1, dtype=torch.float64, device=device)[1:-1].contiguous()
        centres = (torch.arange(_FINE, dtype=torch.float64, device=device) + 0.5 - _FINE // 2) * width
        at = torch.bucketize(centres, edges)
        p, q = (torch.bincount(at, counts, minlength=BINS) + 1e-3 for counts in self.bins)
        p, q = p / p.sum(), q / q.sum()
        return max(float((p * (p / q).log()).sum()), 0.0)


_AllSums = dict[tuple[str, str], _Sums]  # by the names of layer and tensor


def _entry(sums: _AllSums, name: str, tensor: str) -> _Sums:
    return sums.setdefault((name, tensor), _Sums(clipped=0 if tensor == "input" else -1))
