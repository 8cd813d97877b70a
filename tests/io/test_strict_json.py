"""The JSON that untrusted bytes may be: refused by our error or read exactly, nothing in between."""

from __future__ import annotations

import json

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
def test_both_writers_are_read_back_exactly_when_shallow(document: dict[str, object]) -> None:
    for write in (strict_json.lines, strict_json.pretty):
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


def test_lines_refuses_numbers_that_json_has_not() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        strict_json.lines({"a": float("nan")})
