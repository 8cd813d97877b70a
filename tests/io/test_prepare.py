"""What cannot be saved is refused before the directory is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accept
import checkpoints
import pytest
import torch

from pyquant.errors import ArgumentError
from pyquant.io import load_checkpoint, save_checkpoint

LAYER = checkpoints.layer("fc", checkpoints.SCHEMES["W8A8Dynamic"], 4, 8, 1)
SPARSE = torch.eye(3).to_sparse()


def _nested(levels: int) -> Any:
    return {} if levels == 1 else {"a": _nested(levels - 1)}


_CYCLE: dict[str, Any] = {}
_CYCLE["again"] = _CYCLE

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layers": [LAYER, LAYER]}, "layers"),
    ({"layers": [LAYER, checkpoints.layer("fc" + "x" * 252, checkpoints.SCHEMES["W8A8"], 4, 8, 1)]}, "layers"),
    ({"other_tensors": {"fc.weight": torch.ones(1)}}, "other_tensors"),
    ({"other_tensors": {"a\nb": torch.ones(1)}}, "other_tensors"),
    ({"other_tensors": {"": torch.ones(1)}}, "other_tensors"),
    ({"other_tensors": {3: torch.ones(1)}}, "other_tensors"),
    ({"other_tensors": {"x": [1.0]}}, "other_tensors"),
    ({"other_tensors": {"x": torch.ones(1, dtype=torch.complex64)}}, "other_tensors"),
    ({"other_tensors": {"x": torch.ones(1, device="meta")}}, "other_tensors"),
    ({"other_tensors": {"x": SPARSE}}, "other_tensors"),
    ({"extra": {"x": torch.ones(1)}}, "extra"),
    ({"extra": {"x": float("nan")}}, "extra"),
    ({"extra": {"x": [float("inf")]}}, "extra"),
    ({"extra": {"x": 2**63}}, "extra"),
    ({"extra": {"x": {1: 2}}}, "extra"),
    ({"extra": {"x": {1, 2}}}, "extra"),
    ({"extra": {"x": b"bytes"}}, "extra"),
    ({"extra": _nested(8)}, "extra"),
    ({"extra": _CYCLE}, "extra"),
    ({"model_config": {"quantization_config": {}}}, "model_config"),
    ({"model_config": {"x": object()}}, "model_config"),
    ({"max_shard_bytes": 0}, "max_shard_bytes"),
    ({"max_shard_bytes": 1.5}, "max_shard_bytes"),
]


@pytest.mark.parametrize(("change", "argument"), REFUSED, ids=range(len(REFUSED)))
def test_save_refuses_and_leaves_no_trace(change: dict[str, Any], argument: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"layers": [LAYER], "other_tensors": {}, "extra": {}, **change}
    layers, other = arguments.pop("layers"), arguments.pop("other_tensors")
    with pytest.raises(ArgumentError, match=rf"^argument '{argument}"):
        save_checkpoint(tmp_path / "out", layers, other, **arguments)
    accept.t0((tmp_path / "out").exists(), False)


def test_the_deepest_extra_and_its_tuples_come_back_as_lists(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, [], {}, extra={"deep": _nested(6), "t": (1, (2.5, None, True, "ä"))})
    found = load_checkpoint(tmp_path).extra
    accept.t0(dict(found), {"deep": _nested(6), "t": [1, [2.5, None, True, "ä"]]})


def test_a_manifest_that_would_not_be_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, [LAYER], {}, extra={})
    before = sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir())
    monkeypatch.setattr("pyquant.io.checkpoint.MAX_BYTES", 4000)
    with pytest.raises(ArgumentError, match="fewer tensors"):
        save_checkpoint(tmp_path, [LAYER], {}, extra={"x": "y" * 4000})
    accept.t0(sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir()), before)
