"""Public names called with junk in each of their arguments: they raise pyquant's errors and nothing else."""

from __future__ import annotations

import contextlib
import io
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile.valid_calls import POSITIONAL, all_calls
from hostile.valid_methods import all_methods, methods
from sample import sampled
from torch import nn

import pyquant
from pyquant import ops
from pyquant.errors import PyquantError
from pyquant.ops.schema import SCHEMAS


class Anything:
    """A class that takes whatever it is given, so that no error is its own."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**70,
    float("nan"),
    1.5,
    "",
    "x" * 300,
    "a\0b",
    b"x",
    (),
    [1],
    {1: 2},
    {"a": None},
    object(),
    Anything,
    torch.ones(2, 3),
    torch.ones(0, dtype=torch.int64),
    torch.float64,
    nn.Identity(),
    lambda *_, **__: None,
)

# Names that are not called here, each with its reason.
NOT_CALLED = {
    **dict.fromkeys(
        (
            "AutoReport",
            "CallTime",
            "ChainRecord",
            "KernelInfo",
            "LatencyTable",
            "LayerChoice",
            "LayerReport",
            "LayerSpeed",
            "MergeRecord",
            "Plan",
            "FloatMatrix",
        ),
        "a record of results, which the library makes",
    ),
    "ReplacementAction": "an enumeration: Python's own ValueError names the value and the class",
    "QExperts": "takes no argument; from_float makes it",
    "Residual": "takes no argument",
    "torch_fake_quantize": "takes no argument",
}
NOT_CALLED_OF_OPS = {
    "Kernel": "a record of results, which the library makes",
    **dict.fromkeys(("checks_enabled", "native_available", "why_not_native"), "takes no argument"),
    **dict.fromkeys(("set_checks", "set_strict"), "the name is pyquant's, too"),
}
# Methods that are not called here, each with its reason.
NOT_CALLED_METHODS = {
    "LatencyTable.layer_costs": "its one flag only chooses between two numbers of the table",
    "Plan.save_ranges": "its path goes the way of Plan.save; static ranges need a calibration",
}


class Hangs(BaseException):
    """A call that took longer than any here may."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_the_callers_own(error: Exception) -> bool:
    """What the caller's model says to the caller's data, or the file system to a path, passes as it is."""
    inside_a_model = any(frame.name == "_call_impl" for frame in traceback.extract_tb(error.__traceback__))
    return inside_a_model or isinstance(error, OSError)


# Legal wishes that would take for ever.
PATIENCE = {("steps", 2**70), ("epochs", 2**70)}


def raw_errors(function: Callable[..., Any], make: Callable[[Path], dict[str, Any]], folder: Path) -> set[str]:
    """'argument: error' for every argument and junk value whose error is not ours."""
    found: set[str] = set()
    for argument in make(folder):
        for junk in JUNK:
            given = make(folder)
            if (argument, junk if type(junk) is int else None) in PATIENCE:
                continue
            given[argument] = [junk] if argument == POSITIONAL else junk
            positional = given.pop(POSITIONAL, ())
            try:
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), at_most(20):
                    warnings.simplefilter("ignore")
                    function(*positional, **given)
            except PyquantError:
                pass
            except Hangs:
                found.add(f"{argument}: takes for ever with {junk!r:.40}")
            except Exception as error:
                if not is_the_callers_own(error):
                    found.add(f"{argument}: {type(error).__name__} with {junk!r:.40}: {str(error)[:80]}")
    return found


CALLS = all_calls()
METHODS = {name: call for name, call in all_methods().items() if name not in NOT_CALLED_METHODS}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Names that are paths of files are written to, where they are legal; switches are put back."""
    monkeypatch.chdir(tmp_path)
    yield
    pyquant.set_checks(False)
    pyquant.set_strict(False)


@pytest.mark.parametrize("name", sampled(sorted(CALLS), len(CALLS) // 3, "names"))
def test_junk_is_refused_by_our_errors(name: str, tmp_path: Path) -> None:
    function, make = CALLS[name]
    given = make(tmp_path)
    function(*given.pop(POSITIONAL, ()), **given)  # legal, so that what is refused is the junk
    assert raw_errors(function, make, tmp_path) == set()


@pytest.mark.parametrize("name", sampled(sorted(METHODS), len(METHODS) // 3, "methods"))
def test_junk_is_refused_by_methods(name: str, tmp_path: Path) -> None:
    Path("recipe.yaml").write_text("default: W8A8Dynamic")
    function, make = METHODS[name]
    function(**make(tmp_path))
    assert raw_errors(function, make, tmp_path) == set()


def test_every_method_with_arguments_is_called_or_has_its_reason() -> None:
    named = {name for name, raw in methods() if _arguments_of(raw)}
    assert named == set(METHODS) | set(NOT_CALLED_METHODS)
    assert len(METHODS) > 60


def _arguments_of(raw: Any) -> set[str]:
    """The names of a method's arguments, without the object or class itself, *args and **kwargs."""
    import inspect

    is_static = isinstance(raw, staticmethod)
    parameters = list(inspect.signature(raw.__func__ if hasattr(raw, "__func__") else raw).parameters.values())
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in parameters[0 if is_static else 1 :] if p.kind not in kinds}


def test_every_public_name_is_called_or_has_its_reason() -> None:
    names = {n for n in pyquant.__all__ if callable(getattr(pyquant, n))}
    errors = {
        n
        for n in names
        if issubclass(getattr(pyquant, n) if isinstance(getattr(pyquant, n), type) else int, (BaseException, Warning))
    }
    assert names - errors == ({n for n in CALLS if not n.startswith("ops.")} | set(NOT_CALLED))
    of_ops = {n for n in ops.__all__ if callable(getattr(ops, n))}
    assert of_ops == {n.removeprefix("ops.") for n in CALLS if n.startswith("ops.")} | set(NOT_CALLED_OF_OPS)
    assert set(SCHEMAS) <= of_ops


WRITE_FILES = (
    "load_latency",
    "load_pretrained",
    "load_quantized_",
    "quantize_checkpoint_",
    "quantize_files",
    "save_pretrained",
    "QATMonitor",
)


def test_arguments_are_all_of_the_signature() -> None:
    """A new argument of a public function comes into the calls by itself where it has a default; else it is missed."""
    import inspect

    for name, (function, make) in CALLS.items():
        parameters = inspect.signature(function).parameters.values()
        wanted = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        if name not in WRITE_FILES:
            assert wanted <= set(make(Path())), name


def test_a_planted_raw_error_is_seen(tmp_path: Path) -> None:
    def broken(x: Any, y: Any = None) -> None:
        if y is not None:
            y.nothing()

    found = raw_errors(broken, lambda _: {"x": 1, "y": None}, tmp_path)
    assert found
    assert all(line.startswith("y: AttributeError") for line in found)
