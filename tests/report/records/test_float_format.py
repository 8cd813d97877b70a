"""Records of version 1, which called floating point fp16 whatever it was, are read and named anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from searched import search

from pyquant.errors import CheckpointError
from pyquant.report.records.latency import LatencyTable
from pyquant.report.records.record import from_plain, load_record, to_plain
from pyquant.report.records.search import SearchReport
from pyquant.report.records.sensitivity import SensitivityCost, SensitivityGroup, SensitivityReport


def _table(dtypes: tuple[str, str] = ("float32", "float32")) -> LatencyTable:
    return LatencyTable(
        ("a", "b"),
        (("a",), ("b",)),
        ("fp32", "int8"),
        (32, 8),
        (32, 8),
        5.0,
        ((8.0, 4.0), (6.0, None)),
        (((8, 8), (4, 4)), ((6, 6), None)),
        {"a": (8.0, 4.0), "b": (6.0, None)},
        None,
        fingerprint={"formats": "fp32, int8"}
        | {f"layer {n!r}": f"Linear 8 x 8 {d}, in group {n}" for n, d in zip("ab", dtypes, strict=True)},
    )


def _old(value: Any) -> dict[str, Any]:
    """What the version before would have written."""
    plain: dict[str, Any] = json.loads(json.dumps(to_plain(value)).replace('"fp32', '"fp16'))
    plain["version"] = 1
    for name in ("weight_bits", "input_bits"):
        if name in plain:
            plain[name][0] = 16
    return plain


def test_an_old_latency_table_is_named_by_the_layers_of_its_fingerprint() -> None:
    table = _table()
    assert from_plain(_old(table)) == table
    half = from_plain(_old(_table(("bfloat16", "bfloat16"))))
    assert (half.formats, half.weight_bits, half.fingerprint["formats"]) == (("bf16", "int8"), (16, 8), "bf16, int8")
    mixed = from_plain(_old(_table(("bfloat16", "float32"))))
    assert mixed.formats == ("float", "int8")


def test_any_name_of_floating_point_is_the_first_format_of_a_table() -> None:
    table = _table()
    for name in ("float", "fp32", "fp16", "bf16"):  # plans of old files say fp16
        assert table.predict({"a": name, "b": name}) == table.predict((0, 0))
        assert table.us("a", name) == 8.0


def test_old_searches_and_sensitivities_say_float() -> None:
    groups = tuple(SensitivityGroup(name, (name,), 1) for name in ("a", "b"))
    loss, cost = ((0.0, 0.5), (0.0, 3.0)), SensitivityCost(0, 0, 0, 0, 0)
    losses = SensitivityReport(
        "Net",
        "kl",
        "nats",
        "one_at_a_time",
        ("fp32", "int4"),
        groups,
        loss,
        True,
        "nats",
        (0.0, None),
        (),
        None,
        None,
        (),
        cost,
        "",
    )
    for value in (search().record, losses):
        found = from_plain(_old(value))
        assert found.formats[0] == "float"
        assert '"fp16"' not in json.dumps(to_plain(found))  # in quotes: a CPU may be said to have avx512_fp16
        assert '"fp16"' in json.dumps(_old(value))
    assert found == from_plain(to_plain(found))
    assert found.skip_list(1.0) == losses.skip_list(1.0)


def test_an_old_search_says_how_its_bits_were_counted() -> None:
    record = search().record
    found: SearchReport = from_plain(_old(record))
    assert record.notes[0].startswith("fp32: the layer as the model has it, 32 bits")
    assert found.notes[1:] == record.notes[1:]
    assert "16 bits" in found.notes[0]
    assert found.points[0].configuration == {g.name: "float" for g in record.groups}


def test_other_versions_are_refused_as_before(tmp_path: Path) -> None:
    for version in (0, 3, True, "1", None, 1.5):
        file = tmp_path / "r.json"
        file.write_text(json.dumps({**to_plain(_table()), "version": version}))
        with pytest.raises(CheckpointError, match="allowed: 1, 2"):
            load_record(file)
