"""QTensor: codes with the numbers that give them meaning."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QTensor(NamedTuple):
    """Codes, scale and zero point as one value: real = scale * (data - zero_point).

    data        int8 or uint8 codes (int4: packed uint8).
    scale       float32, shape as pyquant.core.granularity.scale_shape says.
    zero_point  int32 of the same shape, or None for symmetric codes.

    A plain named tuple, hence a pytree: it passes through torch.compile, torch.export and DataParallel. It is not a
    tensor subclass, so no operation can act on the codes as if they were real numbers.

    Example:
        >>> import torch
        >>> q = QTensor(torch.tensor([2, -4], dtype=torch.int8), torch.tensor([0.5]))
        >>> (q.data * q.scale).tolist()
        [1.0, -2.0]
    """

    data: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
