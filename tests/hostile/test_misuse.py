"""Public names called with junk: they raise pyquant's errors, or TypeError where the number of arguments is wrong."""

from __future__ import annotations

import contextlib
import inspect
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pyquant
from pyquant import ops
from pyquant.errors import PyquantError
from pyquant.ops.schema import SCHEMAS

JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, float("nan"), 1.5, "", "x" * 300, "a\0b", b"x", (), [1], {1: 2}, {"a": None}, object(),
    int, torch.ones(2, 3), torch.ones(0, dtype=torch.int64), torch.float64, nn.Identity(), lambda: None,
)  # fmt: skip

# Names that are not called here, each with its reason.
NOT_CALLED = {
    "KernelInfo": "a record that the library makes", "LayerReport": "a record", "ChainRecord": "a record",
    "LatencyTable": "a record that files and searches make", "Plan": "a record that a search makes",
    "QuantizedMapping": "a registration, checked where it is used", "QuantizedMetadata": "a record",
    "QTensor": "a container that the ops check", "ReplacementAction": "an enumeration",
    "Residual": "a module without arguments", "SkipQuantization": "a mark", "set_checks": "takes the truth of anything",
    "set_strict": "takes the truth of anything", "measure_latency": "runs for minutes", "search": "runs for minutes",
    "sensitivity": "runs for minutes", "finetune": "runs the caller's own functions",
    "distillation": "runs the caller's own functions", "torch_fake_quantize": "a switch of context",
    "quantization_report": "reads any object as a module", "QuantBasicBlock": "torchvision's signature",
    "QuantBottleneck": "torchvision's signature",
}  # fmt: skip
_WRITES = {name for name in pyquant.__all__ if name.startswith("register_")}
NOT_CALLED |= dict.fromkeys(_WRITES, "writes into a registry of the process")


def functions() -> dict[str, Any]:
    found = {f"ops.{name}": getattr(ops, name) for name in SCHEMAS}
    for name in pyquant.__all__:
        value = getattr(pyquant, name)
        is_error = isinstance(value, type) and issubclass(value, (BaseException, Warning))
        if callable(value) and not is_error and name not in NOT_CALLED:
            found[name] = value
    return found


# function -> kinds of errors that are not ours, for now; a new one fails, and so does one that is gone
RAW: dict[str, set[str]] = {}


def calls(function: Any) -> list[tuple[Any, ...]]:
    """Every junk value in the first place, and repeated in all places without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [(junk,) * max(len(needed), 1) for junk in JUNK]


def raw_errors(function: Any) -> set[str]:
    found: set[str] = set()
    for arguments in calls(function):
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function(*arguments)
        except PyquantError:
            pass
        except TypeError as error:
            if "positional argument" not in str(error) and "keyword" not in str(error):
                found.add("TypeError")
        except Exception as error:
            found.add(type(error).__name__)
    return found


@pytest.mark.parametrize("name", sorted(functions()))
def test_junk_is_refused_by_our_errors(name: str) -> None:
    assert raw_errors(functions()[name]) == RAW.get(name, set())


def test_the_exceptions_are_still_needed() -> None:
    assert set(NOT_CALLED) <= set(pyquant.__all__)
    assert set(RAW) <= set(functions())


def test_a_planted_raw_error_is_seen() -> None:
    def broken(x: Any) -> None:
        x.nothing()

    assert raw_errors(broken) == {"AttributeError"}
