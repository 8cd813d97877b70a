"""The order in which persistent blocks take tiles: what neighbours in time read is shared, and no tile is outside."""

from __future__ import annotations

import itertools

import pytest

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")


def order(rows: int, columns: int, swizzle: int, count: int) -> list[tuple[int, int]]:
    """The first tiles in CUTLASS's order: along the shorter side, `swizzle` lines of the longer one abreast."""
    length = rows if columns > rows else columns
    found = []
    for tile in range(count):
        block, line = divmod(tile, swizzle)
        group, along = divmod(block, length)
        across = group * swizzle + line
        found.append((along, across) if columns > rows else (across, along))
    return found


def rows_read(tiles: list[tuple[int, int]], tile: tuple[int, int]) -> int:
    return len({i for i, _ in tiles}) * tile[0] + len({j for _, j in tiles}) * tile[1]


@pytest.mark.parametrize("tile", [(128, 256), (256, 128), (128, 128), (64, 256)])
@pytest.mark.parametrize("at_once", [132, 66, 33, 4])
def test_of_the_orders_that_divide_both_sides_the_one_that_reads_least(tile: tuple[int, int], at_once: int) -> None:
    for rows, columns in itertools.product((1, 3, 4, 6, 8, 16, 24, 32, 36, 64, 72, 224), repeat=2):
        chosen = native.tile_swizzle(rows, columns, *tile, at_once)
        allowed = [s for s in (1, 2, 4, 8) if not rows % s and not columns % s]
        assert chosen in allowed
        assert len(set(order(rows, columns, chosen, rows * columns))) == rows * columns
        reads = {s: rows_read(order(rows, columns, s, min(at_once, rows * columns)), tile) for s in allowed}
        # of a moment's last, broken line the rule counts the whole
        assert reads[chosen] <= 1.15 * min(reads.values()), (rows, columns, reads)


def test_a_large_product_reads_much_less_at_one_time() -> None:
    """8192 x 8192 in tiles of 128 x 256 over 132 multiprocessors; a small one is left as it was."""
    assert native.tile_swizzle(64, 32, 128, 256, 132) == 8
    straight, square = (rows_read(order(64, 32, s, 132), (128, 256)) for s in (1, 8))
    assert square < 0.65 * straight
    assert native.tile_swizzle(8, 32, 128, 256, 132) == 1
    assert native.tile_swizzle(63, 32, 128, 256, 132) == 1  # nothing divides both
