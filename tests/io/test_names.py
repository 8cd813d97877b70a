"""Names that modules and parameters may have are saved and loaded; format version 3 says that a file has such ones."""

from __future__ import annotations

import json
from pathlib import Path

import accept
import checkpoints
import pytest
import torch
from torch import nn

import pyquant
from pyquant.core.patterns import Expression
from pyquant.io import compressed_tensors, load_checkpoint, save_checkpoint

FIXTURE = Path(__file__).parent / "fixtures" / "version_3"
FIXTURE_PIN = "75e0a450b3a7d57203c38871d342a2a44b55f599b94217f694697b06bd02f242"
NAMES = (
    "a b/c",
    "<paper___cites___paper>",
    "x:y",
    "re:x",
    "_default",
    "it's",
    '"quoted"',
    "back\\slash",
    "größe",
    "層",
    "~",
    "{1}",
)


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.ModuleDict({name: nn.Linear(8, 4) for name in NAMES[:-1]})
    made.register_parameter("a table", nn.Parameter(torch.ones(2)))
    made[NAMES[-1]] = nn.Embedding(3, 8)
    return made


def test_a_model_of_such_names_comes_back(tmp_path: Path) -> None:
    quantised = pyquant.quantize_(model(), {nn.Linear: "W8A8Dynamic", nn.Embedding: "W8A8Dynamic"}, embeddings=True)
    pyquant.save_pretrained(quantised, tmp_path)
    document = json.loads((tmp_path / "manifest.json").read_bytes())
    assert document["version"] == 3
    assert document["layers"].keys() == set(NAMES)
    again = pyquant.load_pretrained(tmp_path, model)
    accept.t0(list(again.state_dict()), list(quantised.state_dict()))
    for key, tensor in quantised.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_targets_name_these_layers_and_no_others(tmp_path: Path) -> None:
    match_name = pytest.importorskip("compressed_tensors.utils.match").match_name
    pyquant.save_pretrained(pyquant.quantize_(model(), "W8A8Dynamic"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())["quantization_config"]
    (group,) = config["config_groups"].values()
    for name in (*NAMES, "x", "a", "re:", "re:x2", "a b"):
        assert any(match_name(name, target) for target in group["targets"]) == (name in NAMES[:-1]), name


def test_a_deep_model_has_targets_that_our_own_reader_takes() -> None:
    """Where a body may lie under a head's prefix, targets are patterns: those of eighty layers are no single one."""
    parts = ("attention.self.query", "attention.output.dense", "intermediate.dense")
    names = [f"bert.encoder.layer.{i}.{part}" for i in range(80) for part in parts]
    targets = compressed_tensors._targets(names, "bert", {})
    assert 2 < len(targets) < 40
    patterns = [Expression(f"(?:{target.removeprefix('re:')}).*") for target in targets]  # as io.foreign reads them
    for name in names:
        for form in (name, name.removeprefix("bert.")):
            assert sum(pattern.matches(form) for pattern in patterns) == 1, form
    for other in ("bert.encoder.layer.80.intermediate.dense", "encoder.layer.1.output.dense", "x.bert.pooler.dense"):
        assert not any(pattern.matches(other) for pattern in patterns), other
    assert compressed_tensors._targets(names[:2], "bert", {}) == [
        r"re:(?:bert\.)?(?:encoder\.layer\.0\.attention\.output\.dense|encoder\.layer\.0\.attention\.self\.query)$"
    ]
    assert compressed_tensors._targets(["bert." + "x" * 2000], "bert", {})  # a name is not cut


def test_plain_names_need_no_new_version(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, [], {"a.b-c_1": torch.ones(1)}, extra={})
    assert json.loads((tmp_path / "manifest.json").read_bytes())["version"] == 1


@pytest.mark.parametrize("name", ["a\nb", "a\x7f", "a\u2028"])
def test_what_no_file_can_hold_is_refused_by_name(name: str, tmp_path: Path) -> None:
    layer = pyquant.QLinear.from_float(nn.Linear(8, 4), pyquant.W8A8Dynamic())
    quantised = nn.ModuleDict({name: layer})  # quantize_ would not have made it
    with pytest.raises(pyquant.ArgumentError, match="printable"):
        pyquant.save_pretrained(quantised, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_fixture_of_version_3_loads_for_ever_and_is_still_written(tmp_path: Path) -> None:
    loaded = load_checkpoint(FIXTURE, manifest_sha256=FIXTURE_PIN)
    accept.t0([layer.name for layer in loaded.layers], ["<a___b>", "a b/c"])
    save_checkpoint(tmp_path, loaded.layers, loaded.tensors, extra=loaded.extra)
    accept.t0(*({p.name: p.read_bytes() for p in d.iterdir()} for d in (tmp_path, FIXTURE)))


def write_fixture() -> str:
    """How the fixture was made."""
    schemes = checkpoints.SCHEMES
    layers = [
        checkpoints.layer("a b/c", schemes["W8A8"], 4, 8, 1),
        checkpoints.layer("<a___b>", schemes["W4A16 g8"], 4, 8, 2),
    ]
    return save_checkpoint(FIXTURE, layers, {"t [0]": torch.arange(3)}, extra={"by": "pyquant"})
