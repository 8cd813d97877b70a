"""SGLang's own files, executed with stand-ins for the modules that they import: without its kernels, its torch, a GPU.

The files are those of the wheel (`make nightly-sglang` unpacks it); what stands in is named here, one by one, so that
nothing of what a test looks at is ours: the hook registry, the parameters and their loaders, the W8A8 scheme.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SITE = ROOT / "build" / "sglang-site"
MISSING = "SGLang's files are not there: make nightly-sglang"
# module -> file: executed as they are
REAL = {
    "sglang.srt.plugins.hook_registry": "srt/plugins/hook_registry.py",
    "sglang.srt.layers.quantization.base_scheme": "srt/layers/quantization/base_scheme.py",
    "sglang.srt.layers.parameter": "srt/layers/parameter.py",
}
SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.schemes"
SCHEME = f"{SCHEMES}.compressed_tensors_w8a8_int8"


def is_there() -> bool:
    return (SITE / "sglang" / "srt" / "plugins" / "hook_registry.py").exists()


def source(path: str) -> Path:
    return SITE / "sglang" / path


def _module(name: str, **held: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(held)
    made.__path__ = []  # type: ignore[attr-defined]
    sys.modules[name] = made
    parent, _, last = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            _module(parent)
        setattr(sys.modules[parent], last, made)
    return made


def _real(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, source(path))
    assert spec is not None
    assert spec.loader is not None
    made = _module(name)
    made.__spec__ = spec
    spec.loader.exec_module(made)
    return made


def narrowed(parameter: Any, loaded: Any, to: int, begin: int, dim: int, size: int, narrow: bool = True) -> Any:
    """narrow_padded_param_and_loaded_weight where nothing is padded."""
    return parameter.narrow(dim, to, size), loaded.narrow(dim, begin, size) if narrow else loaded


@contextlib.contextmanager
def sglang() -> Iterator[SimpleNamespace]:
    """The modules; they are gone afterwards."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    flag = SimpleNamespace(get=lambda: False)
    try:
        _module("sglang").__spec__ = importlib.util.spec_from_loader("sglang", None)
        _module("sglang.srt.environ", envs=SimpleNamespace(SGLANG_QUANT_ALLOW_DOWNCASTING=flag))
        _module("sglang.srt.utils", is_cpu=lambda: True, is_cuda=lambda: False)
        _module("sglang.srt.layers.utils", pad_or_narrow_weight=None)
        _module("sglang.srt.layers.moe", MoeRunnerConfig=object)
        _module("sglang.srt.model_loader.weight_utils", narrow_padded_param_and_loaded_weight=narrowed)
        _module("sglang.kernels.ops.quantization.int8_kernel", per_token_quant_int8=None)
        npu = "sglang.srt.hardware_backend.npu.quantization.linear_method_npu"
        _module(npu, NPUW8A8Int8DynamicLinearMethod=object)
        _module("sglang.srt.layers.quantization.utils", requantize_with_max_scale=None)
        loaded = {name.rpartition(".")[2]: _real(name, path) for name, path in REAL.items()}
        folder = "srt/layers/quantization/compressed_tensors/schemes"
        base = _real(f"{SCHEMES}.compressed_tensors_scheme", f"{folder}/compressed_tensors_scheme.py")
        # the package's own __init__ imports every scheme; this one gives what the file below asks it for
        vars(sys.modules[SCHEMES])["CompressedTensorsLinearScheme"] = base.CompressedTensorsLinearScheme
        loaded["scheme"] = _real(SCHEME, f"{folder}/compressed_tensors_w8a8_int8.py")
        yield SimpleNamespace(**loaded)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)
