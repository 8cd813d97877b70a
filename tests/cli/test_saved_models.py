"""inspect, verify and quantize on what people save: scales of whole tensors, equal layers, Hugging Face folders."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from fresh import python
from torch import nn

import pyquant
from pyquant import QScheme, TensorScheme
from pyquant.cli.main import main
from pyquant.cli.verify import verify_layer
from pyquant.io.pretrained.save import record_of
from pyquant.nn.reordered import Reordered


def per_tensor() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(3)]
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "last": nn.Linear(8, 37)})


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_of_whole_tensors_through_inspect_and_verify(
    tmp_path: Path, symmetric: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = TensorScheme(granularity="per_token", dynamic=True) if symmetric else None
    scheme = QScheme(TensorScheme(symmetric=symmetric), inputs)
    pyquant.save_pretrained(pyquant.quantize_(per_tensor(), scheme), tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "blocks.*.up" in shown
    assert "blocks.0.up" not in shown
    assert [line.split("|")[2].strip() for line in shown.splitlines() if line.startswith("| blocks")] == ["3", "3"]
    assert main(["inspect", str(tmp_path), "--all"]) == 0
    assert "blocks.2.up" in capsys.readouterr().out
    assert main(["verify", str(tmp_path), "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["exact"] for layer in layers] == [True if symmetric else None] * 7


@pytest.mark.parametrize("amax", [0.02, 1.0, 300.0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_verify_compares_on_inputs_of_the_calibrated_range(amax: float, symmetric: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    scheme = pyquant.W8A8(symmetric_inputs=symmetric)
    zero = {} if symmetric else {"input_zero_point": -60}
    layer = pyquant.QLinear.from_float(linear, scheme, input_scale=amax / 127, **zero)  # type: ignore[arg-type]
    verdict = verify_layer(record_of("a", layer), linear)
    assert verdict.exact
    assert verdict.sqnr_db is not None
    # 10 dB and less where inputs of size 1 met another range, 25 where a few lay outside of it and were clipped
    assert verdict.sqnr_db > 35


SORTING = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

def turned():  # code that has the transform itself
    from pyquant import HadamardLinear
    model = build()
    model[2] = HadamardLinear.from_linear(model[2])
    return model
"""


@pytest.mark.parametrize("scheme", [pyquant.W8A8Dynamic(), pyquant.W8A8(symmetric_inputs=False)])
def test_verify_compares_layers_behind_a_step_on_their_inputs(
    scheme: QScheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The float model has the layer itself where the saved one has '2.linear' behind a transform or a sorting."""
    (tmp_path / "sorting_models.py").write_text(SORTING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sorting_models", raising=False)
    models = importlib.import_module("sorting_models")
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    data = [torch.randn(32, 16) for _ in range(4)]
    told = {}
    for name in ("turned", "sorted"):
        model = models.turned() if name == "turned" else models.build()
        if name == "sorted":
            with torch.no_grad():
                model[2].weight.copy_(model[2].weight[:, order])
            model[2] = Reordered(model[2], order)
        pyquant.quantize_(model, scheme, data=data)
        pyquant.save_pretrained(model, tmp_path / name)
        for builder in ("build", "turned") if name == "turned" else ("build",):
            assert main(["verify", str(tmp_path / name), "--against", f"sorting_models:{builder}", "--json"]) == 0
            layers = json.loads(capsys.readouterr().out)["layers"]
            assert [(layer["name"], layer["exact"]) for layer in layers] == [("0", True), ("2.linear", True)]
            told[name, builder] = layers[1]["sqnr_db"]
    assert all(sqnr > 30 for sqnr in told.values()), told
    (tmp_path / "sorting_models.py").write_text(SORTING.replace("nn.ReLU(), ", ""))
    monkeypatch.delitem(sys.modules, "sorting_models")
    assert main(["verify", str(tmp_path / "sorted"), "--against", "sorting_models:build"]) == 2
    assert "a model without a layer '2.linear'" in capsys.readouterr().err


def test_the_recipe_is_recorded(tmp_path: Path) -> None:
    recipe = pyquant.Recipe.from_dict({"default": "W8A8Dynamic"})
    digests = []
    for name, words in (("a", {"recipe": recipe}), ("b", {"recipe": recipe.to_dict()}), ("c", {})):
        model = pyquant.quantize_recipe_(nn.Sequential(nn.Linear(8, 8)), recipe)
        pyquant.save_pretrained(model, tmp_path / name, **words)  # type: ignore[arg-type]
        config = json.loads((tmp_path / name / "config.json").read_bytes())
        digests.append(config["quantization_config"]["pyquant"]["recipe_sha256"])
    assert digests[0] == digests[1] != digests[2] == ""
    assert len(digests[0]) == 64
    with pytest.raises(pyquant.ArgumentError, match="one of the two"):
        pyquant.save_pretrained(model, tmp_path / "d", recipe=recipe, extra={"recipe": {}})
    with pytest.raises(pyquant.ArgumentError, match="'recipe'"):
        pyquant.save_pretrained(model, tmp_path / "d", recipe=3)


def test_fewer_batches_than_usual_are_enough_where_nobody_asks_for_more() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    data = [torch.randn(4, 8) for _ in range(3)]
    assert pyquant.sensitivity(model, data, ("fp32", "int8")).loss
    plan = pyquant.search(model, None, data, ("fp32", "W8A8Dynamic"), lambda m: 0.5, 1.0, "size")
    verdict, *lines = str(plan).splitlines()
    assert "; eval_fn 0.5 where floating point has 0.5" in verdict
    assert [line.partition(" x the bytes of fp32, loses ")[0][:-5] for line in lines] == [
        "  0: W8A8Dynamic,",
        "  1: W8A8Dynamic,",
    ]
    with pytest.raises(pyquant.ArgumentError, match="num_batches"):
        pyquant.sensitivity(model, data, ("fp32", "int8"), num_batches=4)
    with pytest.raises(pyquant.ArgumentError, match="argument 'data': got no batches"):
        pyquant.sensitivity(model, [], ("fp32", "int8"))


FOLDER = """
import contextlib, io, json, os
import torch, transformers as T
import pyquant
from pyquant.cli.main import main
small = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=40, num_attention_heads=2)
told = {}
torch.manual_seed(0)  # of some random classifiers the logits are so small that rounding is a tenth of them
for name, model in {
    "bert": T.BertForSequenceClassification(T.BertConfig(**small, id2label={0: "bad", 1: "good", 2: "so"})),
    "llama": T.LlamaForCausalLM(T.LlamaConfig(**small, pad_token_id=0, tie_word_embeddings=True)),
}.items():
    model.eval().save_pretrained(name)
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [chr(97 + i) for i in range(26)]
    open(f"{name}/vocab.txt", "w").write("\\n".join(vocab))
    T.BertTokenizer(f"{name}/vocab.txt").save_pretrained(name)
    os.makedirs(f"{name}/1_Pooling")
    open(f"{name}/1_Pooling/config.json", "w").write("{}")
    open(f"{name}/secret.bin", "w").write("weights of something else")
    out = f"{name}-q"
    assert main(["quantize", name, "--scheme", "W8A8Dynamic", "--out", out]) == 0
    assert main(["quantize", name, "--scheme", "W8A8Dynamic", "--out", out]) == 0, "again, over the first"
    assert main(["verify", out, "--against", name]) == 0
    for call in (["verify", out, "--against", out], ["quantize", out, "--scheme", "W4A16", "--out", "never"]):
        with contextlib.redirect_stderr(io.StringIO()) as refused:
            assert main(call) == 2
        told_of = refused.getvalue()
        assert told_of.count("\\n") == 1 and f"{out}, which holds a quantised model" in told_of, told_of
        assert not os.path.exists("never")
    read, tokenizer = type(model).from_pretrained(out).eval(), T.AutoTokenizer.from_pretrained(out)
    made = [os.path.exists(f"{folder}/generation_config.json") for folder in (name, out)]
    words = tokenizer("a b c", return_tensors="pt")
    words.pop("token_type_ids", None)
    with torch.no_grad():
        want, got = model(**words).logits, read(**words).logits
    told[name] = {
        "error": float((want - got).norm() / want.norm()),
        "labels": read.config.id2label == model.config.id2label,
        "generation": made[0] == made[1] == (name == "llama"),
        "pooling": os.path.exists(f"{out}/1_Pooling/config.json"),
        "left": not os.path.exists(f"{out}/secret.bin"),
    }
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    loaded = pyquant.load_pretrained(out, skeleton.eval(), device="cpu")
    again = pyquant.load_pretrained(out, model)
    with torch.no_grad():
        told[name]["meta"] = torch.equal(loaded(**words).logits, again(**words).logits)
print(json.dumps(told))
"""


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("compressed_tensors", "transformers")),
    reason="transformers or compressed-tensors is not installed (pip install transformers compressed-tensors==0.20.0)",
)
def test_a_hugging_face_folder_stays_one(tmp_path: Path) -> None:
    for name, found in python(FOLDER, tmp_path).items():
        assert found.pop("error") < 0.03, name
        assert found == dict.fromkeys(found, True), name
