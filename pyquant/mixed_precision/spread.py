"""Work spread over the processes of torch.distributed: every process gets every result, bit for bit as of one process.

Process r takes the items r, r + world, ...; after each round the float64 results travel by all_gather. Every item is
worked out by one process alone, so the results do not depend on how many there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyquant.errors import ArgumentError, PyquantError

T = TypeVar("T")
Rows = list[list[float]]


def spread_rows(
    items: Sequence[T],
    fn: Callable[[T], Sequence[float]],
    width: int,
    *,
    known: Sequence[list[float] | None] = (),
    on_row: Callable[[int, list[float]], None] | None = None,
) -> Rows:
    """fn(item) -> `width` numbers of every item, in order; each is worked out by one process of torch.distributed.

    items   the same in every process.
    fn      must not use collectives itself.
    known   rows that are there already, None for others; the same in every process.
    on_row  on_row(index, row), called in every process for every new row, in order, before more work begins.
    ->      float64 numbers, the same in every process.
    Raises what fn raises, in its process; PyquantError in the others.
    """
    group = _Processes()
    rows = list(known) or [None] * len(items)
    missing = [i for i, row in enumerate(rows) if row is None]
    for first in range(0, len(missing), group.world):
        turn = missing[first : first + group.world]
        results = group.collected(lambda turn=turn: fn(items[turn[group.rank]]), width, len(turn))  # type: ignore[misc]
        for i, row in zip(turn, results, strict=True):
            rows[i] = row
            if on_row is not None:
                group.together(lambda i=i, row=row: on_row(i, row))  # type: ignore[misc]
    return [row for row in rows if row is not None]


def by_first(fn: Callable[[], T]) -> T | None:
    """fn() in process 0, None in the others; where it fails, every process raises."""
    group = _Processes()
    return group.together(fn if group.rank == 0 else lambda: None)


def plain_by_first(make: Callable[[], Any]) -> Any:
    """What process 0 makes, in every process: plain data, sent as JSON text, so that nothing is unpickled."""
    return _Processes().plain(by_first(make))


def check_equal(what: str, fingerprint: str) -> None:
    """Raises ArgumentError in every process where the processes have different fingerprints."""
    group = _Processes()
    digests = group.gathered([float(byte) for byte in hashlib.sha256(fingerprint.encode()).digest()])
    if any(row != digests[0] for row in digests):
        raise ArgumentError(what, f"different ones in the {group.world} processes", "the same in every process")


class _Processes:
    """The default process group, or a world of one."""

    def __init__(self) -> None:
        import torch.distributed as distributed  # only jobs of several processes need it

        self._distributed = distributed
        alone = not (distributed.is_available() and distributed.is_initialized())
        self.rank, self.world = (0, 1) if alone else (distributed.get_rank(), distributed.get_world_size())
        on_gpu = not alone and distributed.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def gathered(self, row: Sequence[float]) -> Rows:
        """The row of every process, in order of their ranks."""
        if self.world == 1:
            return [list(row)]
        mine = torch.tensor(row, dtype=torch.float64, device=self._device)
        each: list[Tensor] = [torch.empty_like(mine) for _ in range(self.world)]
        self._distributed.all_gather(each, mine)
        return [one.tolist() for one in each]

    def plain(self, value: Any) -> Any:
        """The plain data of process 0; JSON has every float exactly."""
        if self.world == 1:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([float(len(data))], dtype=torch.float64, device=self._device)
        self._distributed.broadcast(size, 0)
        text = torch.zeros(int(size.item()), dtype=torch.uint8, device=self._device)
        if self.rank == 0:
            text.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._distributed.broadcast(text, 0)
        return json.loads(bytes(text.tolist()))

    def collected(self, fn: Callable[[], Sequence[float]], width: int, turns: int) -> Rows:
        """One row of each of the first `turns` processes."""

        def work() -> list[float]:
            row = list(fn()) if self.rank < turns else [0.0] * width
            if len(row) != width:
                raise ValueError(f"a row of {len(row)} numbers; allowed: {width}")
            return row

        return self.gathered(self.together(work))[:turns]

    def together(self, fn: Callable[[], Any]) -> Any:
        """fn(), in all processes. One that fails does not leave the others waiting for it: they fail too."""
        result, error = None, None
        try:
            result = fn()
        except Exception as caught:
            error = caught
        if self.world > 1:
            failed = [rank for rank, (flag,) in enumerate(self.gathered([float(error is not None)])) if flag]
            if error is None and failed:
                raise PyquantError(f"process {failed[0]} of {self.world} failed; its own message says why")
        if error is not None:
            raise error
        return result
