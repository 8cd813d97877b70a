"""Whether a large integer product is right, without computing it again: both sides times random vectors of 0 and 1.

For y = x w' and a vector v, y v must equal x (w' v). A row of y that is wrong escapes one vector with probability at
most 1/2, all of them with 2^-vectors. Every number stays an integer below 2^53, so float64 is exact in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 4096  # rows widened to float64 at once


def wrong_rows(y: Tensor, x: Tensor, w: Tensor, *, vectors: int = 64, seed: int = 0) -> list[int]:
    """Rows of y that are not those of x w'.

    y   int32 [m, n];  x int8 [m, k];  w int8 [n, k], all on one device.
    ->  row numbers, ascending, at most 20; none wrong escapes with more than 2^-vectors.
    """
    generator = torch.Generator(y.device).manual_seed(seed)
    v = torch.randint(0, 2, (w.shape[0], vectors), generator=generator, device=y.device).double()
    wv = torch.zeros(w.shape[1], vectors, dtype=torch.float64, device=y.device)
    for start in range(0, w.shape[0], BLOCK):
        wv += w[start : start + BLOCK].double().t() @ v[start : start + BLOCK]
    found: list[int] = []
    for start in range(0, y.shape[0], BLOCK):
        rows = slice(start, start + BLOCK)
        bad = (y[rows].double() @ v != x[rows].double() @ wv).any(1)
        found += (bad.nonzero().flatten() + start).tolist()
        if len(found) >= 20:
            break
    return found[:20]
