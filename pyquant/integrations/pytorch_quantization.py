"""pytorch_quantization's names: QuantDescriptor, TensorQuantizer, calib; thin adaptors over schemes and FakeQuantize.

    from pyquant.compat import pytorch_quantization as quant_nn

Differences on purpose: axis is 0 (the output channel) or None, `num_bits` is 2 to 8 or 16, nothing is patched
globally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.calibrate import HistogramCollector, MaxCalibrator, Range, compute_range, new_statistics
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError
from pyquant.ptq.layer_scheme import check_calibrator
from pyquant.qat.learned import LearnedFakeQuantize
from pyquant.simulate import torch_operators
from pyquant.simulate.fake_quantize import FakeQuantize

HistogramCalibrator = HistogramCollector
calib = SimpleNamespace(MaxCalibrator=MaxCalibrator, HistogramCalibrator=HistogramCollector)


@dataclass(frozen=True)
class QuantDescriptor:
    """How one tensor is quantised, with pytorch_quantization's words.

    num_bits      4 or 8; 2 to 7 and 16 (inputs) in simulation.
    axis          None: one scale. 0: one for each output channel of a weight.
    calib_method  'max', 'histogram' (the method that calibrate_model names), 'percentile', 'entropy', 'mse'.
    learn_amax    training learns the range: prepare_qat_ in layers, a TensorQuantizer by itself.
    unsigned      True is refused: signed codes with a zero point (symmetric=False) do that here.
    narrow_range  codes [-127, 127]; False: [-128, 127].
    amax          a known range [-amax, amax], for TensorQuantizer.

    Raises ArgumentError or SchemeError for what has no counterpart.

    Example:
        >>> str(QuantDescriptor(num_bits=4, axis=0).tensor_scheme()[0])
        'int4 per_channel'
    """

    num_bits: int = 8
    axis: int | Sequence[int] | None = None
    calib_method: str = "max"
    learn_amax: bool = False
    unsigned: bool = False
    narrow_range: bool = True
    amax: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.axis, (list, tuple)):
            object.__setattr__(self, "axis", self.axis[0] if len(self.axis) == 1 else tuple(self.axis))
        if self.axis not in (None, 0) or isinstance(self.axis, bool):
            raise ArgumentError("axis", repr(self.axis), "None, or 0 for the output channels of a weight")
        if self.unsigned:
            raise ArgumentError("unsigned", True, "False; TensorScheme(symmetric=False) uses all codes of one side")
        check_calibrator("calib_method", self.calib_method)
        self.tensor_scheme()

    def tensor_scheme(self) -> tuple[TensorScheme, bool]:
        """The TensorScheme, and whether its calibrator waits for the method of the calibration call."""
        is_open = self.calib_method == "histogram"
        scheme = TensorScheme(
            bits=self.num_bits,
            granularity="per_channel" if self.axis == 0 else "per_tensor",
            narrow_range=self.narrow_range,
            calibrator="percentile" if is_open else self.calib_method,
        )
        return scheme, is_open


class _Switches(type):
    """The class attribute that other people's code sets; it is pyquant.torch_fake_quantize's switch."""

    @property
    def use_fb_fake_quant(cls) -> bool:
        return torch_operators.are_chosen()

    @use_fb_fake_quant.setter
    def use_fb_fake_quant(cls, wanted: bool) -> None:
        torch_operators.choose(wanted)

    @use_fb_fake_quant.deleter
    def use_fb_fake_quant(cls) -> None:
        torch_operators.choose(False)


class TensorQuantizer(nn.Module, metaclass=_Switches):
    """Fake quantisation of one tensor with pytorch_quantization's switches.

    quant_desc          QuantDescriptor.
    disabled            pass tensors through. if_calib   collect instead of quantising.
    use_fb_fake_quant   class switch of the original: every fake quantiser of the process, those of SelectiveQuantizer
                        and prepare_qat_ too, then uses torch's own operators, which exporters to ONNX know, with the
                        differences that pyquant.torch_fake_quantize names.

    Example:
        >>> quantizer = TensorQuantizer(QuantDescriptor(amax=127.0))
        >>> quantizer(torch.tensor([1.4, 300.0])).tolist()
        [1.0, 127.0]
    """

    def __init__(
        self, quant_desc: QuantDescriptor | None = None, disabled: bool = False, if_calib: bool = False
    ) -> None:
        super().__init__()
        self.quant_desc = quant_desc or QuantDescriptor()
        scheme, _ = self.quant_desc.tensor_scheme()
        if scheme.granularity == "per_channel":
            raise ArgumentError("quant_desc", "axis=0", "axis=None here; weights belong to their layers")
        fake = FakeQuantize(scheme)
        self.fake_quantize = LearnedFakeQuantize.of(fake) if self.quant_desc.learn_amax else fake
        self.statistics = new_statistics(scheme)
        self._disabled, self._if_calib = disabled, if_calib
        if self.quant_desc.amax is not None:
            self.amax = torch.tensor(self.quant_desc.amax, device="cpu")

    @property
    def amax(self) -> Tensor | None:
        """The range's larger end, float32; None before calibration."""
        scale = self.fake_quantize.scale
        return scale * self.fake_quantize.scheme.code_range[1] if self.fake_quantize.is_calibrated else None

    @amax.setter
    def amax(self, value: Tensor | float) -> None:
        self.fake_quantize.set_range(
            Range.symmetric(torch.as_tensor(value, dtype=torch.float32, device=self.fake_quantize.scale.device))
        )

    def enable(self) -> None:
        """Quantise (or collect) again."""
        self._disabled = False

    def disable(self) -> None:
        """Pass tensors through."""
        self._disabled = True

    def enable_calib(self) -> None:
        """Collect statistics of every tensor that comes by."""
        self._if_calib = True

    def disable_calib(self) -> None:
        """Stop collecting."""
        self._if_calib = False

    def load_calib_amax(self, method: str | None = None, percentile: float = 99.99) -> None:
        """Take the range from what was collected; `method` and `percentile` are for 'histogram' descriptors."""
        scheme, is_open = self.quant_desc.tensor_scheme()
        name = (method or scheme.calibrator) if is_open else scheme.calibrator
        chosen = replace(scheme, calibrator=name, percentile=percentile)
        self.fake_quantize.set_range(compute_range(self.statistics, chosen))

    def forward(self, x: Tensor) -> Tensor:
        """x float, any shape -> the same shape and type."""
        if self._disabled:
            return x
        if self._if_calib:
            self.statistics.observe(x.detach())
            return x
        if torch_operators.are_chosen():  # right here, as a trace of the original has it
            return torch_operators.fake_quantize(self.fake_quantize, x)
        y: Tensor = self.fake_quantize(x)
        return y

    def extra_repr(self) -> str:
        """The switches, as print(model) shows them."""
        words: dict[str, Any] = {"disabled": self._disabled, "if_calib": self._if_calib}
        return ", ".join(f"{key}={value}" for key, value in words.items() if value)
