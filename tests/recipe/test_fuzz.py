"""Any document is a recipe or an ArgumentError that names what is wrong; load, dump, load is the identity."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import accept
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pyquant.errors import ArgumentError
from pyquant.recipe import LayerRule, Recipe

pytest.importorskip("yaml", reason="PyYAML is not installed")

WHERE = "some.file"
FORMS = ["yaml", "json"]
try:
    import tomllib  # noqa: F401

    FORMS.append("toml")
except ImportError:  # Python 3.10
    pass

quick = settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])

# ---- valid recipes, as plain data

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.isprintable)
NAMES = st.sampled_from(
    ["head", "blocks.0.fc1", "*.fc2", "re:blocks\\.[0-3]\\.fc1", "type:Linear", "a b", "é", "1", "on"]
)
KEYS = NAMES | WORDS.filter(lambda word: not word.startswith(("re:", "type:")) and word != "_default")
METHODS = st.sampled_from(["max", "percentile", "entropy", "mse"])
OPEN = METHODS | st.just("histogram")
PERCENT = st.floats(0, 100, exclude_min=True) | st.integers(1, 100)
SHARE = st.floats(0, 1) | st.integers(0, 1)
COUNT = st.integers(1, 2**31 - 1)
FLAG = st.booleans()


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings with any of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


TENSOR = some(calibrator=OPEN, percentile=PERCENT, granularity=st.sampled_from(["per_tensor", "per_channel"]))
SCHEMES = st.sampled_from(
    [
        {"scheme": "W8A8"},
        {"scheme": "W8A8", "symmetric_inputs": False},
        {"scheme": "W8A8Dynamic"},
        {"scheme": "W4A4"},
        {"scheme": "W4A8", "group_size": 32},
        {"scheme": "W4A8(group_size=None)"},
        {"scheme": "W8A16", "symmetric": False},
        {"scheme": "W4A16(group_size=64)"},
        {"scheme": "FP16"},
        {"scheme": "FP16", "dtype": "bfloat16"},
    ]
)


def _means_something(rule: dict[str, Any]) -> bool:
    try:
        LayerRule.from_plain(rule, WHERE)
    except ArgumentError:
        return False
    return True


DETAILS = some(weights=TENSOR, inputs=TENSOR, reason=WORDS)
FULL_RULES = st.builds(lambda scheme, rest: scheme | rest, SCHEMES, DETAILS).filter(_means_something)
RULES = st.none() | st.just("float") | st.sampled_from(["W8A8", "W4A16", "FP16"]) | FULL_RULES | some(inputs=TENSOR)
CALLBACK = some(
    batch_size_divisor=COUNT,
    max_epochs_divisor=COUNT,
    lr_decay_factor=st.floats(1e-9, 10),
    cosine_final_lr_ratio=SHARE,
    disable_phase_callbacks=FLAG,
    disable_augmentations=FLAG,
)
DOCUMENTS = some(
    pyquant_recipe=st.just(1),
    ptq_only=FLAG,
    selective_quantizer_params=some(
        calibrator_w=OPEN,
        calibrator_i=OPEN,
        per_channel=FLAG,
        learn_amax=FLAG,
        skip_modules=st.none() | st.lists(st.sampled_from(["stem", "re:.*gate", "type:Bilinear"]), unique=True),
    ),
    calib_params=some(histogram_calib_method=METHODS, percentile=PERCENT, num_calib_batches=COUNT, verbose=FLAG),
    pre_launch_callbacks_list=st.just([]) | CALLBACK.map(lambda c: [{"QATRecipeModificationCallback": c}]),
    default=st.sampled_from(["W8A8", "W4A8Dynamic"]) | FULL_RULES,
    layers=st.dictionaries(KEYS, RULES, max_size=3),
    chains=st.sampled_from(["auto", "off"]) | st.lists(st.lists(WORDS, min_size=2, max_size=2), max_size=2),
    residuals=st.sampled_from(["quantize", "float"]),
    search=some(
        formats=st.lists(st.sampled_from(["fp16", "bf16", "int8", "int4"])),
        metric=st.sampled_from(["sqnr", "kl"]),
        algorithm=st.sampled_from(["greedy", "ilp"]),
        max_drop=SHARE,
        never_slower_margin=SHARE,
    ),
    qat=some(
        optimizer=st.sampled_from(["sgd", "adam", "adamw"]),
        momentum=SHARE,
        grad_clip=st.floats(0, 1e9),
        amp=st.sampled_from(["off", "bf16", "fp16"]),
        start_from=st.sampled_from(["ptq", "float"]),
    ),
    provenance=some(gpu=WORDS, torch=WORDS),
)


def _read(data: dict[str, Any]) -> Recipe:
    try:
        return Recipe.from_dict(data, WHERE)
    except ArgumentError:  # a default in floating point, say, below a layer that takes the default's inputs
        assume(False)
        raise


@given(DOCUMENTS)
@settings(quick, max_examples=200)
def test_load_dump_load_is_the_identity(data: dict[str, Any]) -> None:
    recipe = _read(data)
    accept.t0(Recipe.from_dict(recipe.to_dict()) == recipe, True)
    for form in FORMS:
        text = recipe.dumps(form)
        again = Recipe.loads(text, form, WHERE)
        assert again == recipe, text
        accept.t0((again.dumps(form), list(again.layers)), (text, list(recipe.layers)))


def test_the_strategy_reaches_every_key_of_a_recipe() -> None:
    """What is never generated is never tested."""
    written = Recipe.from_dict({key: {} for key in ("search", "qat", "provenance")}).to_dict()
    known = {*written, "layers", "pre_launch_callbacks_list"}
    with pytest.raises(ArgumentError) as error:
        Recipe.from_dict({"no such key": 1})
    accept.t0({key for key in known if key not in str(error.value)}, set())
    seen: set[str] = set()

    @given(DOCUMENTS)
    @settings(quick, max_examples=60, database=None)
    def look(data: dict[str, Any]) -> None:
        seen.update(data)

    look()
    accept.t0(known - seen, set())


# ---- junk

LEAVES = (
    st.none() | FLAG | st.integers() | st.floats() | st.text(max_size=8) | WORDS | st.sampled_from([2**31, -1, "W8A8("])
)
JUNK = st.recursive(
    LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=6) | KEYS, x, max_size=3)
)


@given(st.data())
@settings(quick, max_examples=1000)
def test_junk_in_the_place_of_a_value_is_taken_or_named(data: st.DataObject) -> None:
    document = copy.deepcopy(data.draw(DOCUMENTS))
    assume(document)
    _read(document)
    node: Any = document
    path: list[Any] = []
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        path.append(key)
        if not (isinstance(node[key], (dict, list)) and node[key] and data.draw(st.integers(0, 2))):
            break
        node = node[key]
    if isinstance(node, dict) and data.draw(FLAG):
        junk: Any = data.draw(st.text(max_size=8) | st.integers() | st.none() | st.just(f"{key}s"))
        node[junk] = node.pop(key)  # a wrong key
    else:
        junk = node[key] = data.draw(JUNK)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recipe = Recipe.from_dict(document, WHERE)
    except ArgumentError as error:
        told = str(error)
        accept.t0(error.argument, "recipe")
        assert str(path[0]) in told or repr(junk) in told or "default" in told, (path, junk, told)
        return
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize("form", FORMS)
def test_mutated_documents(form: str) -> None:
    pieces = st.sampled_from(
        list("{}[]\",:'\n\t \\#&*!|>%@`-?=.0e+é\0\x85\ud800") + ["null", "1e999", "---", "!!int", "<<", "2001-99-99"]
    )
    edit = st.tuples(st.floats(0, 1), st.integers(0, 6), pieces | st.text(max_size=3))

    @given(DOCUMENTS, st.lists(edit, min_size=1, max_size=4))
    @settings(quick, max_examples=400)
    def run(data: dict[str, Any], edits: list[tuple[float, int, str]]) -> None:
        text = _read(data).dumps(form)
        for place, cut, piece in edits:
            at = int(place * len(text))
            text = text[:at] + piece + text[at + cut :]
        _check_text(text, form)

    run()


@pytest.mark.parametrize("form", FORMS)
def test_any_text(form: str) -> None:
    alphabet = st.sampled_from(list("{}[]\",:'\n\t \\#&*!|>%-?=._0123456789abeE+~<\0\x7f\u2028\ud800"))

    @given(st.text(max_size=60) | st.text(alphabet, max_size=60))
    @settings(quick, max_examples=600)
    def run(text: str) -> None:
        _check_text(text, form)

    run()


def _check_text(text: str, form: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recipe = Recipe.loads(text, form, WHERE)
    except ArgumentError as error:
        accept.t0(error.argument, "recipe")
        accept.t0(WHERE in str(error), True, what=str(error))
        return
    assert Recipe.loads(recipe.dumps(form), form) == recipe


@given(JUNK)
@settings(quick, max_examples=500)
def test_any_plain_data(data: Any) -> None:
    try:
        recipe = Recipe.from_dict(data, WHERE)
    except ArgumentError:
        return
    assert json.loads(recipe.dumps("json")) == recipe.to_dict()
