"""The seventeen bugs by which acceptance rules were compared: int8 per token x int8 per channel + bias, 64 x 256 x 520.

Each is a whole broken GEMM; the suite's rules (accumulators equal, then T2) must reject it for every seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import accept
import torch
from mutants import nothing, register
from problems import Draw
from torch import Tensor

M, N, K = 64, 256, 520


@dataclass(frozen=True)
class Case:
    """Operands of the honest GEMM, all float64 or int64."""

    x: Tensor
    w: Tensor
    x_scale: Tensor
    w_scale: Tensor
    bias: Tensor
    dtype: torch.dtype
    draw: Draw

    @property
    def acc(self) -> Tensor:
        return (self.x.double() @ self.w.double().T).long()


def case(seed: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    draw = Draw(seed, "rules")
    x, w = draw.normal(M, K).double(), draw.normal(N, K).double() * 0.05
    x_scale, w_scale = (t.abs().amax(1) / 127 for t in (x, w))
    x_scale, w_scale = x_scale.float().double(), w_scale.float().double()
    codes = [torch.round(t / s[:, None]).clamp(-127, 127).long() for t, s in ((x, x_scale), (w, w_scale))]
    return Case(*codes, x_scale, w_scale, draw.normal(N).double(), dtype, draw)


def epilogue(c: Case, acc: Tensor) -> Tensor:
    """float32 steps: acc * x_scale * w_scale + bias."""
    t = acc.float() * c.w_scale.float() * c.x_scale.float()[:, None]
    return t + c.bias.float()


def judge(c: Case, acc: Tensor, y: Tensor) -> None:
    accept.t0(acc, c.acc, what="accumulator")
    scaled = c.acc.double() * (c.x_scale[:, None] * c.w_scale)
    accept.t2(y, scaled + c.bias, scaled.abs() + c.bias.abs(), what="output")


def _acc_bug(change: Callable[[Case, Tensor], Tensor]) -> Callable[[Case], tuple[Tensor, Tensor]]:
    def run(c: Case) -> tuple[Tensor, Tensor]:
        acc = change(c, c.acc)
        return acc, epilogue(c, acc).to(c.dtype)

    return run


def _operand_bug(change: Callable[[Case], Case]) -> Callable[[Case], tuple[Tensor, Tensor]]:
    def run(c: Case) -> tuple[Tensor, Tensor]:
        broken = change(c)
        return broken.acc, epilogue(broken, broken.acc).to(c.dtype)

    return run


def _at(c: Case) -> tuple[int, int]:
    return c.draw.integer(0, M - 1), c.draw.integer(0, N - 1)


def _add_one(c: Case, acc: Tensor, amount: int) -> Tensor:
    acc = acc.clone()
    acc[_at(c)] += amount
    return acc


def _missed_stage(c: Case, acc: Tensor) -> Tensor:
    row, col = 16 * c.draw.integer(0, M // 16 - 1), 16 * c.draw.integer(0, N // 16 - 1)
    rows, cols, stage = slice(row, row + 16), slice(col, col + 16), slice(128, 192)
    acc = acc.clone()
    acc[rows, cols] -= (c.x[rows, stage].double() @ c.w[cols, stage].double().T).long()
    return acc


def _last_repeats(t: Tensor) -> Tensor:
    return torch.cat([t[:-1], t[-2:-1]])


def _swapped_pairs(w: Tensor) -> Tensor:
    w = w.clone()
    w[:, -8:] = w[:, -8:].reshape(-1, 4, 2).flip(-1).reshape(-1, 8)
    return w


def _bias_missing(c: Case) -> Case:
    bias = c.bias.clone()
    bias[-8:] = 0
    return replace(c, bias=bias)


def _zero_point_forgotten(c: Case) -> tuple[Tensor, Tensor]:
    """Codes carry zero point 1; the accumulator is not corrected for it."""
    acc = ((c.x + 1).double() @ c.w.double().T).long()
    return acc, epilogue(c, acc).to(c.dtype)


def _one_nan(c: Case) -> tuple[Tensor, Tensor]:
    y = epilogue(c, c.acc).to(c.dtype)
    y[_at(c)] = float("nan")
    return c.acc, y


def _tail_row(c: Case) -> tuple[Tensor, Tensor]:
    y = epilogue(c, c.acc).to(c.dtype)
    y[-1] = 0
    return c.acc, y


def _truncated(c: Case) -> tuple[Tensor, Tensor]:
    exact = epilogue(c, c.acc)
    y = exact.to(c.dtype)
    above = y.float().abs() > exact.abs()
    return c.acc, torch.where(above, (y.view(torch.int16) - 1).view(c.dtype), y)


def _rounded_product(c: Case) -> tuple[Tensor, Tensor]:
    product = (c.acc.float() * c.w_scale.float() * c.x_scale.float()[:, None]).to(c.dtype).float()
    return c.acc, (product + c.bias.float()).to(c.dtype)


BUGS: dict[str, Callable[[Case], tuple[Tensor, Tensor]]] = {
    "last k dropped": _operand_bug(lambda c: replace(c, x=c.x[:, :-1], w=c.w[:, :-1])),
    "last 8 k dropped": _operand_bug(lambda c: replace(c, x=c.x[:, :-8], w=c.w[:, :-8])),
    "one 16x16 tile misses a K stage": _acc_bug(_missed_stage),
    "one accumulator off by 1": _acc_bug(lambda c, acc: _add_one(c, acc, 1)),
    "one accumulator off by 2^15": _acc_bug(lambda c, acc: _add_one(c, acc, 2**15)),
    "last row uses the previous row's scale": _operand_bug(lambda c: replace(c, x_scale=_last_repeats(c.x_scale))),
    "last channel uses the previous scale": _operand_bug(lambda c: replace(c, w_scale=_last_repeats(c.w_scale))),
    "channel scales replaced by their mean": _operand_bug(
        lambda c: replace(c, w_scale=c.w_scale.mean().expand_as(c.w_scale))
    ),
    "bias missing in the last 8 columns": _operand_bug(_bias_missing),
    "clamp at -126": _operand_bug(lambda c: replace(c, x=c.x.clamp(min=-126))),
    "pair order swapped in the last group": _operand_bug(lambda c: replace(c, w=_swapped_pairs(c.w))),
    "zero point 1 not corrected": _zero_point_forgotten,
    "one NaN": _one_nan,
    "tail row not written": _tail_row,
    "output truncated instead of rounded": _truncated,
    "product rounded to 16 bit before bias": _rounded_product,
    "accumulator saturates at int16": _acc_bug(lambda c, acc: acc.clamp(-(2**15), 2**15 - 1)),
}


def _notice(bug: Callable[[Case], tuple[Tensor, Tensor]]) -> Callable[[int], None]:
    def notice(seed: int) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            c = case(seed, dtype)
            try:
                judge(c, *bug(c))
            except AssertionError:
                continue
            return  # not noticed in this output type
        raise AssertionError("rejected in both output types")

    return notice


for _name, _bug in BUGS.items():
    register(nothing, _notice(_bug), name=_name, area="rules")
