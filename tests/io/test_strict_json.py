"""The JSON that untrusted bytes may be: refused by our error or read exactly, nothing in between."""

from __future__ import annotations

import json
from collections.abc import Callable

import accept
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyquant.errors import CheckpointError
from pyquant.io import strict_json

REFUSED = {
    "empty": b"",
    "not an object": b"[]",
    "number": b"1",
    "two documents": b"{}{}",
    "trailing comma": b'{"a":1,}',
    "comment": b'{"a":1}//x',
    "single quotes": b"{'a':1}",
    "repeated key": b'{"a":1,"a":1}',
    "repeated key inside": b'{"b":{"a":1,"c":2,"a":3}}',
    "NaN": b'{"a":NaN}',
    "infinity": b'{"a":-Infinity}',
    "float beyond range": b'{"a":1e999}',
    "integer above 63 bits": b'{"a":9223372036854775808}',
    "integer below -63 bits": b'{"a":-9223372036854775808}',
    "a million digits": b'{"a":' + b"9" * 1_000_000 + b"}",
    "a million digits after the point": b'{"a":0.' + b"9" * 1_000_000 + b"}",
    "nine levels": b'{"a":' * 9 + b"1" + b"}" * 9,
    "nine levels of arrays": b'{"a":' + b"[" * 8 + b"]" * 8 + b"}",
    "a million brackets": b'{"a":' + b"[" * 1_000_000,
    "not ASCII": '{"a":"é"}'.encode(),
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"a":1}',
    "null byte": b'{"a":\x001}',
    "control character in text": b'{"a":"\x01"}',
    "too long": b" " * (strict_json.MAX_BYTES + 1),
}

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_loads_refuses_with_our_error_naming_the_file(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^x\.json: "):
        strict_json.loads(data, "x.json")


@pytest.mark.parametrize("levels", [1, 8])
def test_loads_reads_the_allowed_depth(levels: int) -> None:
    document = strict_json.loads(b'{"a":' * levels + b"1" + b"}" * levels, "x.json")
    accept.t0(strict_json.is_deeper_than(document, levels), False)
    accept.t0(strict_json.is_deeper_than(document, levels - 1), True)


def test_loads_reads_the_largest_integers() -> None:
    accept.t0(strict_json.loads(b'{"a":9223372036854775807,"b":-9223372036854775807}', "x")["a"], 2**63 - 1)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
@settings(max_examples=500, deadline=None)
def test_all_writers_are_read_back_exactly_when_shallow(document: dict[str, object]) -> None:
    for write in (strict_json.lines, strict_json.pretty, strict_json.compact):
        data = write(document)
        if strict_json.is_deeper_than(document, strict_json.MAX_DEPTH):
            with pytest.raises(CheckpointError):
                strict_json.loads(data, "x")
        else:
            accept.t0(repr(strict_json.loads(data, "x")), repr(json.loads(data)))
            accept.t0(write(strict_json.loads(data, "x")), data)


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:0123456789.eE+-ntf\\u aN', max_size=200).map(str.encode))
@settings(max_examples=3000, deadline=None)
def test_loads_raises_nothing_but_our_error(data: bytes) -> None:
    try:
        found = strict_json.loads(data, "x")
    except CheckpointError:
        return
    accept.t0(found, json.loads(data))


NUMBERS = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(NUMBERS | st.text(max_size=60) | st.none() | st.booleans(), min_size=20, max_size=80), st.text())
@settings(max_examples=200, deadline=None)
def test_compact_keeps_wide_lists_and_rows_as_they_are(values: list[object], name: str) -> None:
    document = {name: values, name + "rows": [{"values": values}, {"name": name, "values": values * 9}, values]}
    accept.t0(json.dumps(strict_json.loads(strict_json.compact(document), "x")), json.dumps(document))


def test_compact_writes_a_point_a_line_and_fills_lines_with_numbers() -> None:
    points = [{"configuration": {f"layer {i}": "int8" for i in range(9)}, "cost": float(n)} for n in range(700)]
    tables = {"a": {"b": [i / 7 for i in range(1000)]}, "names": [f"layer {i}" for i in range(1000)]}
    notes = ["A note is a sentence and has a line of its own.", "short", "shorter", "A second one is " + "long. " * 20]
    found = strict_json.compact({"points": points, "notes": notes, **tables}).decode().splitlines()
    assert sum(line.startswith('  {"configuration"') for line in found) == 700
    assert len(found) < 700 + 1000 // 5 + 1000 // 9 + 20
    assert [line.strip() for line in found if "short" in line] == ['"short", "shorter",']
    assert max(len(line) for line in found if '"configuration"' not in line and "long" not in line) <= strict_json.LINE
    assert strict_json.compact({"a": [1, {}], "b": {}}) == b'{"a": [1, {}], "b": {}}\n'


def test_compact_breaks_an_entry_that_no_screen_holds() -> None:
    found = strict_json.compact({"tables": [{"rows": [{"k": n, "us": 0.5} for n in range(1000)]}]}).decode()
    assert max(map(len, found.splitlines())) <= strict_json.LINE


@pytest.mark.parametrize("write", [strict_json.lines, strict_json.pretty, strict_json.compact])
def test_writers_refuse_numbers_that_json_has_not(write: Callable[[dict[str, float]], bytes]) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write({"a": float("nan")})
