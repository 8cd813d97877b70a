"""Group sizes that do not divide K: simulation and training choose and report as quantize_ does, to the checkpoint."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyquant
from pyquant import W4A8Dynamic
from pyquant.io import load_checkpoint, save_checkpoint

NOTE = "group size 16 does not divide K = 24: one scale a channel"
PREPARE: dict[str, Callable[..., nn.Module]] = {
    "insert_fake_quantize_": pyquant.insert_fake_quantize_,
    "prepare_qat_": pyquant.prepare_qat_,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8))


@pytest.mark.filterwarnings("ignore::pyquant.QATWarning")
@pytest.mark.parametrize("how", PREPARE)
def test_one_scale_a_channel_told_from_the_start_to_the_file(how: str, tmp_path: Path) -> None:
    with pytest.warns(pyquant.QuantizationWarning, match=f"{how}: 1 .*another scheme: 2 .*{NOTE}") as caught:
        prepared = PREPARE[how](model(), W4A8Dynamic(16))
    assert caught[-1].filename == __file__
    told = {r.name: (r.scheme, r.reason) for r in pyquant.quantization_report(prepared)}
    assert told["2"] == ("W4A8Dynamic(group_size=None), simulated", NOTE)
    assert told["0"] == ("W4A8Dynamic(group_size=16), simulated", "")
    prepared(torch.randn(4, 32)).sum().backward()
    pyquant.convert_(prepared)
    assert {r.name: r.reason for r in pyquant.quantization_report(prepared)} == {"0": "", "2": NOTE}
    pyquant.save_pretrained(prepared, tmp_path)
    loaded = pyquant.load_pretrained(tmp_path, model)
    assert {r.name: r.reason for r in pyquant.quantization_report(loaded)} == {"0": "", "2": NOTE}


@pytest.mark.filterwarnings("ignore::pyquant.QATWarning")
@pytest.mark.parametrize("how", PREPARE)
def test_or_it_is_left_or_refused_and_the_model_stays(how: str) -> None:
    with pytest.warns(pyquant.QuantizationWarning, match=r"2 \(Linear.*group size 16 does not divide K = 24"):
        prepared = PREPARE[how](model(), W4A8Dynamic(16), on_indivisible="skip")
    assert type(prepared[2]) is nn.Linear  # type: ignore[index]
    whole = model()
    with pytest.raises(pyquant.SchemeError, match=r"2: group_size.*divisor of in_features = 24"):
        PREPARE[how](whole, W4A8Dynamic(16), on_indivisible="error")
    with pytest.raises(pyquant.ArgumentError, match="on_indivisible"):
        PREPARE[how](whole, W4A8Dynamic(16), on_indivisible="no")
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        with pytest.raises(pyquant.QuantizationWarning):
            PREPARE[how](whole, W4A8Dynamic(16), on_indivisible="skip")
        assert [type(m) for m in whole.children()] == [nn.Linear, nn.ReLU, nn.Linear]
        assert pyquant.quantization_report(whole)[1].reason == "left alone"
        PREPARE[how](whole, {"0": W4A8Dynamic(16)})  # what nobody meant needs no words


@pytest.mark.filterwarnings("ignore::pyquant.QATWarning")
def test_a_recipe_says_it_for_training() -> None:
    recipe = pyquant.Recipe.from_dict({"default": "W4A8Dynamic(group_size=16)", "on_indivisible": "skip"})
    with pytest.warns(pyquant.QuantizationWarning, match="does not divide"):
        assert type(pyquant.prepare_qat_(model(), recipe)[2]) is nn.Linear  # type: ignore[index]
    with pytest.warns(pyquant.QuantizationWarning, match="another scheme"):
        assert type(pyquant.prepare_qat_(model(), recipe, on_indivisible="per_channel")[2]) is not nn.Linear  # type: ignore[index]


def test_selective_quantizer_keeps_the_note() -> None:
    with pytest.warns(pyquant.QuantizationWarning, match="another scheme"):
        pyquant.SelectiveQuantizer(scheme=W4A8Dynamic(16), verbose=False).quantize_module(whole := model())
    assert {r.name: r.reason for r in pyquant.quantization_report(whole)} == {"0": "", "2": NOTE}
    assert {r.reason for r in pyquant.quantization_report(pyquant.convert_(whole))} == {"", NOTE}


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    checkpoint = load_checkpoint(folder)
    extra = copy.deepcopy(dict(checkpoint.extra))
    change(extra["pyquant_modules"])
    save_checkpoint(folder, checkpoint.layers, checkpoint.tensors, extra=extra)


@pytest.mark.filterwarnings("ignore::pyquant.QuantizationWarning")
def test_files_without_notes_load_and_wrong_notes_are_refused(tmp_path: Path) -> None:
    pyquant.save_pretrained(pyquant.quantize_(model(), W4A8Dynamic(16)), tmp_path)
    _edit(tmp_path, lambda own: own.update(notes=["2"]))
    with pytest.raises(pyquant.CheckpointError, match="notes"):
        pyquant.load_pretrained(tmp_path, model)
    _edit(tmp_path, lambda own: own.update(notes={"2": "two\nlines"}))
    with pytest.raises(pyquant.CheckpointError, match="notes"):
        pyquant.load_pretrained(tmp_path, model)
    _edit(tmp_path, lambda own: own.pop("notes"))
    assert {r.reason for r in pyquant.quantization_report(pyquant.load_pretrained(tmp_path, model))} == {""}
