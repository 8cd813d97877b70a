"""What surrounds a launch stays as it was: guard bands round operands, refusals that leave no trace, equal repeats.

On the PTX simulator and on a GPU. The results themselves: test_gemm.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_device import MODES, PAIRS, SENTINEL, Memory, shared_out
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from test_gemm import CASES, ROWS, compare, make_case, run

BAND = 4096  # bytes on each side; keeps the alignment that the kernels ask for
NAN = 0xFF  # as bytes: NaN in every float type, -1 in every integer type


class Banded(Memory):
    """A memory that puts every buffer between two bands of one byte, and looks after them."""

    def __init__(self, inner: Memory, fill: int) -> None:
        self.inner, self.fill, self.sizes = inner, fill, {}
        self.is_simulator = inner.is_simulator

    def put(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        band = torch.full((BAND,), self.fill, dtype=torch.uint8)
        pointer = self.inner.put(torch.cat([band, data, band]))
        self.sizes[pointer] = data.numel()
        return pointer + BAND

    def get(self, pointer: int, nbytes: int) -> Tensor:
        return self.inner.get(pointer - BAND, BAND + nbytes)[BAND:]

    def free(self) -> None:
        self.sizes.clear()
        self.inner.free()

    def touched(self) -> list[str]:
        """Buffers whose bands are no longer what they were."""
        wrong = []
        for pointer, size in self.sizes.items():
            raw = self.inner.get(pointer, size + 2 * BAND)
            if not bool((raw[:BAND] == self.fill).all() and (raw[BAND + size :] == self.fill).all()):
                wrong.append(f"buffer of {size} bytes")
        return wrong


def outs_of(name: str) -> list[str]:
    """Two output types of a row: together a narrow and a wide one."""
    outs = ROWS[name]["out"]
    return list(dict.fromkeys([outs[0], outs[-1]]))


@pytest.mark.parametrize("fill", [SENTINEL, NAN], ids=["sentinel", "nan"])
@pytest.mark.parametrize("name", ROWS)
def test_nothing_outside_of_the_operands_is_written_or_used(
    native: Any, plain_device: Memory, name: str, fill: int
) -> None:
    """With NaN in the bands a value that is read beyond an operand and used shows in the result."""
    banded = Banded(plain_device, fill)
    for out in outs_of(name):
        for index in range(1000, 1000 + max(2, CASES // 3)):
            case = make_case(name, out, index)
            compare(run(native, banded, case), case.want(), case.repeat)
            assert not banded.touched(), case.repeat
            banded.free()


def test_bands_can_be_touched(plain_device: Memory) -> None:
    """The check itself: a buffer that somebody wrote beside is reported."""
    banded = Banded(plain_device, SENTINEL)
    pointer = banded.put(torch.arange(10, dtype=torch.int32))
    assert torch.equal(banded.get(pointer, 40).view(torch.int32), torch.arange(10, dtype=torch.int32))
    assert banded.touched() == []
    banded.fill = NAN  # as if every band had been overwritten
    assert banded.touched() == ["buffer of 40 bytes"]


REFUSED = (
    ({"k": 1 << 20}, r"K must be (at most|a multiple)"),
    ({"x_align": 1, "w_align": 1, "k": 64, "ldx": 65}, r"alignment|multiple"),
    ({"w": "f32"}, r"."),
    ({"n": 1 << 40}, r"."),
)


@pytest.mark.parametrize("name", ROWS)
def test_a_refusal_leaves_the_next_call_right(native: Any, plain_device: Memory, name: str) -> None:
    out = ROWS[name]["out"][0]
    refused = 0
    for index in range(2000, 2000 + max(2, CASES // 3)):
        case = make_case(name, out, index)
        for change, told in REFUSED:
            ok, *_, text = native.refusal(name, case.problem | change, native.device_info(0), False)
            if ok:
                continue  # this row takes it
            refused += 1
            with pytest.raises(ValueError, match=told):
                native.gemm(name, case.problem | change, {}, case.epilogue)
            assert text
        compare(run(native, plain_device, case), case.want(), case.repeat)
        plain_device.free()
    assert refused >= 2


@pytest.mark.parametrize("name", ROWS)
def test_repeats_are_equal_bit_for_bit(native: Any, device: Memory, name: str) -> None:
    """Sums that are divided over blocks may finish in any order; their bits may not depend on it."""
    out = "f32" if "f32" in ROWS[name]["out"] else ROWS[name]["out"][0]
    case = make_case(name, out, 3000)
    first = run(native, device, case)
    for _ in range(2 if device.is_simulator else 200):
        again = run(native, device, case)
        assert torch.equal(again.view(torch.uint8), first.view(torch.uint8)), case.repeat
        device.free()


@pytest.mark.parametrize("count", [3, 6, 24])
def test_every_case_runs_in_two_modes_and_every_mode_has_cases(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.delenv("PYQUANT_NIGHTLY", raising=False)
    seen = set()
    for key in range(32):
        shares = {
            mode: shared_out(SimpleNamespace(is_simulator=True, mode_name=mode), range(count), key) for mode in MODES
        }
        assert all(shares.values())
        for case in range(count):
            pair = tuple(mode for mode in ("plain", "checked", "lazy", "random") if case in shares[mode])
            assert pair in PAIRS
            seen.add((case, pair))
    assert len(seen) == 4 * count, "whatever the key is, a case runs in the same modes"
    assert shared_out(SimpleNamespace(is_simulator=False, mode_name="plain"), range(count)) == list(range(count))
    monkeypatch.setenv("PYQUANT_NIGHTLY", "1")
    assert shared_out(SimpleNamespace(is_simulator=True, mode_name="plain"), range(count)) == list(range(count))
