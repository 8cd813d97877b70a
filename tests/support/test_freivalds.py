"""The probabilistic check of large products accepts right ones and finds one wrong element."""

from __future__ import annotations

import torch
from freivalds import wrong_rows


def problem(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    w = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    return (x.double() @ w.double().t()).to(torch.int32), x, w


def test_right_products_pass_at_every_block_boundary() -> None:
    for m, n, k in ((1, 1, 1), (4096, 8, 16), (4097, 3, 5), (17, 4100, 9)):
        assert wrong_rows(*problem(m, n, k)) == []


def test_extreme_values_stay_exact() -> None:
    x, w = torch.full((3, 2048), -128, dtype=torch.int8), torch.full((4200, 2048), -128, dtype=torch.int8)
    y = torch.full((3, 4200), 128 * 128 * 2048, dtype=torch.int32)
    assert wrong_rows(y, x, w) == []
    y[1, 4199] += 1
    assert wrong_rows(y, x, w) == [1]


def test_one_wrong_element_is_found_wherever_it_is() -> None:
    y, x, w = problem(130, 70, 33)
    for row, column in ((0, 0), (129, 69), (64, 1)):
        bad = y.clone()
        bad[row, column] ^= 1
        assert wrong_rows(bad, x, w) == [row]


def test_two_errors_that_cancel_in_a_sum_are_found() -> None:
    y, x, w = problem(40, 50, 16)
    y[7, 3] += 5
    y[7, 4] -= 5  # the plain sum of the row is right
    assert wrong_rows(y, x, w) == [7]
    assert wrong_rows(y.roll(1, 1), x, w)
