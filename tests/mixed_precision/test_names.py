"""What a float layer is called in everything that is written: by its dtype, never by another one."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from searched import batches, net

import pyquant

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TEXTS = ("json", "md", "csv", "html", "svg")


@pytest.mark.parametrize("name", DTYPES)
def test_every_report_calls_floating_point_by_its_dtype(name: str, tmp_path: Path) -> None:
    model, data = net().to(DTYPES[name]), [batch.to(DTYPES[name]) for batch in batches(2)]
    others = set(DTYPES) - {name}
    formats = ("float", "W8A8Dynamic")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = pyquant.search(model, data[0], data, formats, max_drop=0.0, objective="effective_bits", num_batches=2)
        losses = pyquant.sensitivity(model, data, formats, num_batches=2)
        table = pyquant.measure_latency(model, data[0], formats, rounds=2, min_rounds=1, held_out=1)
    from pyquant.report import registry
    from pyquant.report.records.record import save_record

    for stem, record in (("search", plan.record), ("sensitivity", losses), ("latency", table)):
        save_record(tmp_path / f"{stem}.json", record)
        registry.write(record, tmp_path, stem, tuple(set(TEXTS) & set(registry.formats_of(record))))
    plan.save(tmp_path / "recipe.yaml")
    files = list(tmp_path.iterdir())
    assert {"recipe.yaml", "search.html", "sensitivity.md", "latency.svg"} <= {file.name for file in files}
    for file in files:
        text = re.sub(r"avx512_(fp16|bf16)|amx_(fp16|bf16)", "", file.read_text())  # instruction sets
        found = {word for word in others if re.search(rf"(?<![a-z0-9_]){word}(?![a-z0-9_])", text)}
        assert not found, (file.name, found)
        drawn = file.stem == "sensitivity" and file.suffix in (".svg", ".csv")  # the lowered formats alone
        assert drawn or name in text, file.name


@pytest.mark.parametrize("name", DTYPES)
def test_bits_and_bytes_of_floating_point_agree(name: str) -> None:
    model, data = net().to(DTYPES[name]), [batch.to(DTYPES[name]) for batch in batches(2)]
    plan = pyquant.search(model, data[0], data, ("float", "W8A8Dynamic"), max_drop=0.0, objective="size", num_batches=2)
    base = plan.record.points[plan.record.reference]
    biases = sum(layer.bias.nbytes for layer in model if isinstance(layer, torch.nn.Linear))
    weights = sum(layer.weight.numel() for layer in model if isinstance(layer, torch.nn.Linear))
    assert base.effective_bits * weights == pytest.approx(8 * (base.size_bytes - biases))
