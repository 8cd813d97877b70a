"""FakeQuantize: a tensor's codes and back, in floating point: what the integer layer will do to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant import ops
from pyquant.calibrate import Range, RangeStatistics, new_statistics, range_to_qparams
from pyquant.calibrate.padding import counted
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn.nested import each_token
from pyquant.nn.state import same_type
from pyquant.simulate import torch_operators

How = tuple[str, int, int, int]
FLOOR_KEY: Final = "floor"  # what a learned scale has in its state beyond these


class FakeQuantize(nn.Module):
    """Quantise and dequantise a tensor; gradients pass straight through the rounding.

    scheme        TensorScheme of the tensor, 2 to 8 bits, or 16: int16 codes.
    shape         shape of the scale: (1,) per tensor, [N] or [N, K / group_size] for weights.
    follows       True: the range is the data's own in every call (dynamic inputs; max-calibrated weights, whose range
                  moves with them in training). False: `scale` and `zero_point` hold a calibrated range.
    device        of the buffers.

    State of a layer that does not follow: `scale` float32, `zero_point` int32 (affine schemes only); a scale of NaN
    means not calibrated. Modes: 'quantize' (the default), 'collect' (observe, pass on unchanged), 'off' (pass on).
    Codes are those of ops.quantize, bit for bit (16 bits: of torch's fake quantisation).
    Raises ArgumentError for wrong arguments, and in forward where a static range was never calibrated.
    Source: docs/numerics.md 2; Bengio, Leonard, Courville 2013, arXiv:1308.3432.

    Example:
        >>> fake = FakeQuantize(TensorScheme(), follows=True)
        >>> fake(torch.tensor([127.0, 0.6])).tolist()
        [127.0, 1.0]
    """

    scale: Tensor
    zero_point: Tensor | None

    def __init__(
        self,
        scheme: TensorScheme,
        shape: tuple[int, ...] = (1,),
        *,
        follows: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(scheme, TensorScheme):
            raise ArgumentError("scheme", str(scheme), "a TensorScheme")
        self.scheme = scheme
        self.follows = scheme.dynamic if follows is None else follows
        self.mode = "quantize"
        self.statistics: RangeStatistics | None = None
        if not self.follows:
            self.register_buffer("scale", torch.full(shape, torch.nan, dtype=torch.float32, device=device))
            zero_point = None if scheme.symmetric else torch.zeros(shape, dtype=torch.int32, device=device)
            self.register_buffer("zero_point", zero_point)

    def forward(self, x: Tensor) -> Tensor:
        """x float [..., K] -> the same shape and type: scale * (code - zero_point)."""
        if x.is_nested:
            return each_token(self, x)
        if self.statistics is not None:
            self.statistics.observe(counted(x.detach()) if self.has_rows else x.detach())
            return x
        if self.mode == "off":
            return x
        if torch_operators.are_chosen():
            return torch_operators.fake_quantize(self, x)
        s = self.scheme
        if s.bits > 8:  # pyquant's operators have codes of a byte
            return torch_operators.fake_quantize(self, x, s.code_range)
        if self.follows:
            y: Tensor = ops.fake_quantize_dynamic(x, s.granularity, s.group_size or 0, s.symmetric, *s.code_range)[0]
            return y
        self.check_calibrated()
        return self._static(x)

    def _static(self, x: Tensor) -> Tensor:
        y: Tensor = ops.fake_quantize(x, self.scale, self.zero_point, *self.how)[0]
        return y

    @property
    def how(self) -> How:
        """Granularity, group size (0: none), smallest and largest code: what operators of a given range take."""
        s = self.scheme
        return s.granularity, s.group_size or 0, *s.code_range

    def start_calibration(self) -> dict[str, RangeStatistics]:
        """Forward observes and passes on unchanged from here on; -> new statistics, none where the range follows."""
        if self.follows:
            return {}
        self.statistics, self.mode = new_statistics(self.scheme), "collect"
        return {"x": self.statistics}

    def stop_calibration(self) -> None:
        """From here on forward quantises again; the range stays as it was (set_range changes it)."""
        if self.mode == "collect":
            self.statistics, self.mode = None, "quantize"

    # Whether what is rounded is [..., channels], of which positions may be padding, and no image.
    has_rows = True
    # Whether the calibration call names the method (SelectiveQuantizer's calibrator 'histogram').
    method_is_open = False
    # Whether prepare_qat_ is to learn the range, where it can (SelectiveQuantizer's default_learn_amax).
    learn_amax = False

    @property
    def is_calibrated(self) -> bool:
        """Whether a range is known (or needs none)."""
        return self.follows or self._is_known

    @torch.no_grad()
    def set_range(self, found: Range) -> None:
        """Take a calibrated range: float32 low and high of one element or of the scale's shape."""
        self.set_qparams(*range_to_qparams(found, self.scheme))

    @torch.no_grad()
    def set_qparams(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Take a scale (float32, finite, > 0) and, for affine schemes, a zero point (int32)."""
        if self.follows:
            raise ArgumentError("scale", "a range", "none: the range of this tensor follows its data")
        scale = scale.detach().to(self.scale)
        if scale.numel() not in (1, self.scale.numel()) or not bool(((scale > 0) & scale.isfinite()).all()):
            raise ArgumentError("scale", f"{list(scale.shape)}", f"{list(self.scale.shape)}, finite and above 0")
        self.scale.copy_(scale.reshape(self.scale.shape) if scale.numel() > 1 else scale)
        if self.zero_point is not None:
            zero = torch.zeros_like(self.zero_point) if zero_point is None else zero_point
            self.zero_point.copy_(zero.reshape(self.zero_point.shape) if zero.numel() > 1 else zero)
        self._is_known = True

    _is_known = False

    def check_calibrated(self) -> None:
        """Raise ArgumentError where a static range is missing."""
        if not self.is_calibrated:
            allowed = "a calibrated range: run calibration first, or a dynamic scheme"
            raise ArgumentError("scale", "not calibrated", allowed)

    def qparams(self, x: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point (None: symmetric) that forward uses; `x` is the data where the range follows it."""
        self.check_calibrated()
        if not self.follows:
            return self.scale.detach(), self.zero_point
        if x is None:
            raise ArgumentError("x", "None", "the tensor whose range is meant")
        s = self.scheme
        how = (s.granularity, s.group_size or 0, s.symmetric, *s.code_range)
        _, scale, zero_point = ops.quantize_dynamic(x.detach().to(torch.float32), *how)
        return scale, None if s.symmetric else zero_point

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FakeQuantize:
        super()._apply(lambda tensor: same_type(fn, tensor), recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]
        if not self.follows:
            self._is_known = bool(self.scale.isfinite().all())
        if FLOOR_KEY not in self._buffers and prefix + FLOOR_KEY in (unexpected := rest[3]):
            unexpected.remove(prefix + FLOOR_KEY)

    def extra_repr(self) -> str:
        """The scheme in one line, as print(model) shows it."""
        return str(self.scheme) + ("" if self.is_calibrated else ", not calibrated")
