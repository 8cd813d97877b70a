"""Loads the compiled library, which defines torch.ops.pyquant, or defines and implements the ops here and says why."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.ops import autograd, fallback, flops, plan, routed, shapes, strict, transforms, tuned, versions
from pyquant.ops.schema import NATIVE, SCHEMAS, TAGS, UNDIFFERENTIATED
from pyquant.ops.spec import LinearSpec

LIBRARY = Path(__file__).resolve().parent.parent / "lib" / "libpyquant_torch.so"
_CPU_KEYS = ("CPU", "CompositeExplicitAutograd")

_definitions = torch.library.Library("pyquant", "DEF")
_python_kernels: torch.library.Library | None = None
_why_not_native: str | None = None


def native_available() -> bool:
    """True when the compiled library serves the ops."""
    return _why_not_native is None


def why_not_native() -> str | None:
    """Why the compiled library is not in use; None when it is."""
    return _why_not_native


def layout_for(device: torch.device, spec: LinearSpec | None = None) -> str:
    """The layout that a packed buffer has on a device; of a given layer, the one that suits the GPU's kernels best."""
    if _checked(device).type == "cpu":
        return "cpu_blocked" if native_available() else "rows"
    return plan.weight_layout(spec, plan.Device.of(device)) if device.type == "cuda" and spec is not None else "rows"


def _checked(device: torch.device) -> torch.device:
    if not isinstance(device, torch.device):
        raise ArgumentError("device", arguments.shown(device), "a torch.device")
    return device


@functools.lru_cache(maxsize=64)
def _int4_multiple(index: int) -> int:
    return plan.reads_int4_packed(plan.Device.of(torch.device("cuda", index)).sm)


# What torch.compiler.assume_constant_result does, without the second that importing it takes.
_int4_multiple._dynamo_marked_constant = True  # type: ignore[attr-defined]


def packs_int4(device: torch.device, columns: int) -> bool:
    """Whether int4 activations lie two a byte on a device: where its int4 tensor cores read them so.

    device   where they are.     columns   of a row: codes that the kernels take packed come in multiples of 32.

    Example:
        >>> packs_int4(torch.device("cpu"), 4096)
        False
    """
    if _checked(device).type != "cuda" or columns % 32 or columns == 0:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    multiple = _int4_multiple(index)
    return multiple > 0 and columns % multiple == 0


def holds_row(device: torch.device, columns: int) -> bool:
    """Whether hadamard_transform and hadamard_quantize take rows of so many columns on a device: any number on a CPU,
    what shared memory holds in float32 on a GPU.

    Example:
        >>> holds_row(torch.device("cpu"), 1 << 20)
        True
    """
    arguments.whole("columns", columns, 0)
    if _checked(device).type != "cuda":
        return device.type == "cpu"
    index = torch.cuda.current_device() if device.index is None else device.index
    return native_available() and columns <= _row_floats(index)


@functools.lru_cache(maxsize=64)
def _row_floats(index: int) -> int:
    return (plan.Device.of(torch.device("cuda", index)).shared_bytes - (4 << 10)) // 4


_row_floats._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=64)
def has_kernel(name: str, device_type: str) -> bool:
    """Whether the compiled library serves an op on the devices of a type."""
    key = device_type.upper()
    return key in ("CPU", "CUDA") and torch._C._dispatch_has_kernel_for_dispatch_key(f"pyquant::{name}", key)


def _define() -> None:
    """Every op of the table, by Python where no library has defined it; then what only Python registers."""
    tags = [getattr(torch.Tag, name) for name in TAGS]
    for name, schema in {**SCHEMAS, **NATIVE}.items():
        packet = getattr(torch.ops.pyquant, name, None)
        if packet is None:
            _definitions.define(name + schema, tags=tags if name in SCHEMAS else ())
        elif packet.default._schema != torch._C.parse_schema(f"pyquant::{name}{schema}"):
            raise ImportError(_of_another_version(f"its op {packet.default._schema} is pyquant::{name}{schema} here"))
        elif name in SCHEMAS and any(tag not in packet.default.tags for tag in tags):
            packet.default._tags = tags  # torch before 2.12 takes none from a library of the stable ABI
    for name, rule in {**dict(zip(SCHEMAS, SCHEMAS, strict=True)), **UNDIFFERENTIATED}.items():
        torch.library.register_fake(f"pyquant::{name}", shapes.rule_of(rule), lib=_definitions)
    routed.register(_definitions)
    autograd.register(_definitions)
    versions.register(_definitions)
    transforms.register(_definitions)
    flops.register()


def _check_kernels() -> None:
    """A library that was built before an op was added has none for it."""
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in (*SCHEMAS, *NATIVE):
        served = name in fallback.EVERYWHERE or any(kernel(f"pyquant::{name}", key) for key in _CPU_KEYS)
        if not served:
            raise ImportError(_of_another_version(f"it has no kernel for {name}"))


def _of_another_version(difference: str) -> str:
    return (
        f"{LIBRARY} was built from another version of pyquant than the Python files around it: {difference}. Build "
        "it again (docs/install.md), or run without it: PYQUANT_DISABLE_NATIVE=1"
    )


def _load() -> str | None:
    if os.environ.get("PYQUANT_DISABLE_NATIVE", "") not in ("", "0"):
        return "PYQUANT_DISABLE_NATIVE is set"
    if not LIBRARY.exists():
        return _why_missing(LIBRARY, sys.path)
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY.name} cannot be loaded: {error}"
    return None


def _why_missing(library: Path, path: Sequence[str]) -> str:
    """A source tree in front of an installed package is the usual reason: Python looks in the current folder first."""
    tree = library.parents[2]
    if not (tree / "setup.py").exists():
        return f"{library.name} is not there: the package was installed without its native build"
    inner = library.relative_to(tree)
    installed = [folder for folder in map(Path, path) if folder.resolve() != tree and (folder / inner).exists()]
    advice = f"pyquant is installed in {installed[0]}" if installed else "install it (docs/install.md)"
    return f"Python imports the source tree {tree}, which is not built: {advice}, so run from another folder"


def _announced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A Python stand-in for a compiled kernel, which says so."""

    @functools.wraps(kernel)
    def announced(*args: Any, **kwargs: Any) -> Any:
        strict.slower_path("integer ops run in plain PyTorch", str(_why_not_native))
        return kernel(*args, **kwargs)

    return announced


def _initialise() -> None:
    global _why_not_native, _python_kernels
    _why_not_native = _load()
    _define()
    if _why_not_native is None:
        _check_kernels()
        tuned.activate_found()
    # Byte plumbing and 16-bit products are torch code on every device; the integer kernels are compiled.
    _python_kernels = torch.library.Library("pyquant", "IMPL")
    for name in fallback.EVERYWHERE if native_available() else SCHEMAS:
        kernel = fallback.IMPLEMENTATIONS[name]
        _python_kernels.impl(name, kernel if name in fallback.EVERYWHERE else _announced(kernel), "CPU")
    for name in fallback.ON_CUDA:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"pyquant::{name}", "CUDA"):
            _python_kernels.impl(name, fallback.IMPLEMENTATIONS[name], "CUDA")


_initialise()
