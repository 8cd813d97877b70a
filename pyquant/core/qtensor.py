"""QTensor: codes with the numbers that give them meaning."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QTensor(NamedTuple):
    """Codes, scale and zero point as one value: real = scale * (data - zero_point).

    data        int8 or uint8 codes, one a byte (two a byte: PackedQTensor).
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


class PackedQTensor(QTensor):
    """A QTensor of int4 codes that lie two a byte, as pack_int4 makes them: data is uint8 [..., K / 2], K even.

    What Quantize and int4 layers give on GPUs whose int4 tensor cores read them so (compute capability 8.0 to 8.9);
    elsewhere the same codes lie one a byte in a QTensor. The numbers are the same.

    Example:
        >>> import torch
        >>> from pyquant.ops import pack_int4
        >>> q = PackedQTensor(pack_int4(torch.tensor([[2, -4]], dtype=torch.int8)), torch.tensor([0.5]))
        >>> isinstance(q, QTensor), q.data.shape
        (True, torch.Size([1, 1]))
    """

    __slots__ = ()
