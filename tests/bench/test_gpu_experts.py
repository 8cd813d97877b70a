"""bench.gpu_experts without a GPU: what it times is what banks give, and what is not right is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import gpu_experts  # noqa: E402
from bench.gpu_experts import BF16, ONE_BY_ONE, SCHEMES, SMALL, Shape  # noqa: E402
from pyquant import QLinear  # noqa: E402
from pyquant.errors import UnsupportedError  # noqa: E402
from pyquant.report.records.figures import Figures  # noqa: E402
from pyquant.report.records.record import load_record  # noqa: E402


def words(out: Path) -> list[str]:
    return ["--clock", "faked", "--rounds", "1", "--model", "small", "--tokens", "1", "9", "--out", str(out)]


def test_every_scheme_of_a_bank_is_timed(tmp_path: Path) -> None:
    assert gpu_experts.main(words(tmp_path)) == 0
    rows = load_record(tmp_path / "gpu_experts.json", Figures, faked=True).rows("rows")
    assert [row["tokens"] for row in rows] == [1, 9]
    kinds = [*SCHEMES, f"W8A16, {ONE_BY_ONE}", f"W4A16(128), {ONE_BY_ONE}"]
    for row in rows:
        assert row[f"us {BF16}"] == pytest.approx(1.0)
        for kind in kinds:
            assert row[f"ratio {kind}"] == pytest.approx(1.0)
            assert row[f"db {kind}"] > 10
        assert all(row[f"how {scheme}"] for scheme in SCHEMES)
    text = (tmp_path / "gpu_experts.md").read_text()
    assert f"## small: {SMALL['small']}\n" in text
    assert "one call for 8 experts" in text


@torch.inference_mode()
def test_the_base_is_every_token_through_its_experts() -> None:
    shape = Shape(32, 16, 4, 2)
    bank = gpu_experts.FloatBank(shape, "cpu")
    run = gpu_experts.candidates({BF16: bank}, shape, 5, "cpu")[BF16]
    x, ids, weights = run.args  # type: ignore[attr-defined]
    want = torch.zeros(5, 32)
    for t, slots in enumerate(ids.tolist()):
        for j, e in enumerate(slots):
            gate, up = (x[t] @ bank.up[e].T).chunk(2)
            want[t] += (F.silu(gate) * up @ bank.down[e].T).float() * weights[t, j]
    torch.testing.assert_close(run().float(), want, rtol=2**-6, atol=2**-6)


def test_sizes_that_groups_do_not_divide_leave_them_out() -> None:
    banks = gpu_experts.banks_of(Shape(64, 32, 2, 1), "cpu")
    assert set(banks) == {BF16, "W8A8Dynamic", "W8A16"}


def test_a_wrong_result_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = gpu_experts.quantised

    def swapped(bank: gpu_experts.FloatBank, scheme: object) -> object:
        """The weights of the first two experts change places."""
        new = quantised(bank, scheme)  # type: ignore[arg-type]
        if scheme is SCHEMES["W8A16"][0]:
            (first, _), (second, _) = new.expert(0), new.expert(1)
            assert isinstance(first, QLinear)
            first.load_state_dict(second.state_dict())
        return new

    monkeypatch.setattr(gpu_experts, "quantised", swapped)
    assert gpu_experts.main(words(tmp_path)) == 1
    rows = load_record(tmp_path / "gpu_experts.json", Figures, faked=True).rows("rows")
    assert rows[1]["db W8A16"] < SCHEMES["W8A16"][1] < rows[1]["db W8A8Dynamic"] + 5


def test_a_bank_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise UnsupportedError("a reason")

    monkeypatch.setattr(gpu_experts, "banks_of", broken)
    assert gpu_experts.main(words(tmp_path)) == 1
    assert "small, 1 tokens failed: a reason" in (tmp_path / "gpu_experts.md").read_text()
