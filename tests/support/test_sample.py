from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import sample
from sample import drawn, sampled


def test_every_case_is_drawn_by_some_commit_and_one_commit_draws_the_same() -> None:
    cases = [f"case {i}" for i in range(20)]
    draws = [drawn(cases, 4, "grid", commit=str(i)) for i in range(100)]
    assert {len(set(taken)) for taken in draws} == {4}
    assert {case for taken in draws for case in taken} == set(cases)
    assert drawn(cases, 4, "grid", commit="7") == draws[7]
    assert drawn(cases, 4, "other", commit="7") != draws[7]
    assert drawn(cases, 99, "grid") == cases


def test_a_loop_takes_some_and_nightly_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "NIGHT", False)
    assert sample.some(range(9), 2, "loop") == drawn(range(9), 2, "loop")
    monkeypatch.setattr(sample, "NIGHT", True)
    assert sample.some(range(9), 2, "loop") == list(range(9))


def test_the_others_are_nightly() -> None:
    params = sampled(range(10), 3, "test", always=[4, 5])
    day = [param.values[0] for param in params if not param.marks]
    assert [param.id for param in params] == list(map(str, range(10)))
    assert {4, 5} < set(day)
    assert len(day) == 5
    with pytest.raises(AssertionError, match="no such cases"):
        sampled(range(3), 1, always=[7])


def test_the_longest_files_come_first_and_are_there(request: pytest.FixtureRequest) -> None:
    conftest = next(p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "LONGEST"))
    path = Path(conftest.__file__).parent
    missing = [str(path) for path in conftest._PLACES if not path.is_file()]
    assert not missing
    assert len(set(conftest.LONGEST)) == len(conftest.LONGEST)
    names = ("nn/test_convert.py", conftest.LONGEST[1], "core/test_scheme.py", conftest.LONGEST[0])
    items = [SimpleNamespace(path=path / name, get_closest_marker=lambda _: None) for name in names]
    conftest.pytest_collection_modifyitems(items)
    assert [str(item.path.relative_to(path)) for item in items] == [*conftest.LONGEST[:2], names[0], names[2]]
