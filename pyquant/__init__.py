"""pyquant: int8 and int4 Linear layers that run in integers, exactly, on CPUs and NVIDIA GPUs."""

from pyquant.core.presets import (
    FP16,
    W4A4,
    W4A8,
    W4A16,
    W8A8,
    W8A16,
    W4A4Dynamic,
    W4A8Dynamic,
    W8A8Dynamic,
    scheme_from_name,
)
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import (
    ArgumentError,
    CheckpointError,
    NativeLibraryError,
    NonFiniteError,
    PyquantError,
    SchemeError,
    UnsupportedError,
)
from pyquant.nn.convert import quantize_
from pyquant.nn.fuse import fuse_
from pyquant.nn.fuse_rules import register_fusion
from pyquant.nn.kernel_info import KernelInfo
from pyquant.nn.match import FqnConfig
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.report import LayerReport, quantization_report
from pyquant.ops import set_checks, set_strict
from pyquant.pretrained import load_pretrained, save_pretrained

__version__ = "0.1.0"

__all__ = [
    "FP16", "W4A4", "W4A8", "W4A16", "W8A8", "W8A16", "ArgumentError", "CheckpointError", "FqnConfig", "KernelInfo",
    "LayerReport", "NativeLibraryError", "NonFiniteError", "PyquantError", "QEmbedding", "QLinear", "QScheme",
    "QTensor", "SchemeError", "TensorScheme", "UnsupportedError", "W4A4Dynamic", "W4A8Dynamic", "W8A8Dynamic",
    "fuse_", "load_pretrained", "quantization_report", "quantize_", "register_fusion", "save_pretrained",
    "scheme_from_name", "set_checks", "set_strict",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "doctor":  # the command line's module; kept out of the import path of everybody else
        from pyquant.cli.doctor import doctor

        return doctor
    raise AttributeError(f"module 'pyquant' has no attribute {name!r}")
