"""The machine, the versions and the command that a figure belongs to."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from pathlib import Path

import torch

from pyquant.report.records.environment import Environment

_X86_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")
_ARM_FLAGS = ("asimd", "asimddp", "i8mm", "bf16")
_ISA_FLAGS = _X86_FLAGS + _ARM_FLAGS
DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"})  # of bytes
_PACKAGES = (
    "numpy",
    "transformers",
    "torchao",
    "safetensors",
    "triton",
    "gemlite",
    "humming-kernels",
    "bitsandbytes",
    "scikit-learn",
)


def describe_environment(device: str | torch.device = "cpu", *, clock: str = "") -> Environment:
    """Hardware, versions, threads and command line of this process, as a record.

    device  'cpu' or a CUDA device; its properties are read, nothing is run on it.
    clock   what was timed, as named in pyquant.measure.timing.
    """
    device = torch.device(device)
    model, flags = cpu_model_and_flags()
    gpu, driver = "", ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs"
        driver = _driver_version()
    return Environment(
        device=str(device),
        cpu=model,
        cpu_isa=[flag for flag in _ISA_FLAGS if flag in flags],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
        threads=torch.get_num_threads(),
        gpu=gpu,
        driver=driver,
        cuda=torch.version.cuda or "",
        torch=str(torch.__version__),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        pyquant=own_version(),
        packages={name: version for name in _PACKAGES if (version := package_version(name))},
        clock=clock,
        command=command_line(),
    )


def cpu_model_and_flags() -> tuple[str, frozenset[str]]:
    """The processor's name and feature flags; empty flags where the system does not report them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text, flags=re.MULTILINE))
    name = fields.get("model name", platform.machine())
    if "model name" not in fields and "CPU part" in fields:  # Arm's, which tells numbers
        name += f" (implementer {fields.get('CPU implementer', '?')}, part {fields['CPU part']})"
    return name, frozenset((fields.get("flags") or fields.get("Features", "")).split())


def cpu_features() -> frozenset[str]:
    """The instruction sets of this CPU that matter to integer products; empty where the system does not report them."""
    return cpu_model_and_flags()[1] & frozenset(_ISA_FLAGS)


def command_line() -> str:
    """The command that started this process, in a form that can be typed again from the repository's root."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        return shlex.join(["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]])
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path("python")
    try:
        shown = str(program.resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        shown = program.name
    prefix = ["python", shown] if program.suffix == ".py" else [program.name]
    return shlex.join([*prefix, *sys.argv[1:]])


def library_digest() -> str:
    """The first digits of a SHA-256 over pyquant's compiled libraries: distinguishes two builds of one version."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).resolve().parents[1] / "lib").glob("*.so")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def own_version() -> str:
    """pyquant's version, also from a source tree that is not installed."""
    return str(getattr(sys.modules.get("pyquant"), "__version__", ""))


def package_version(package: str) -> str:
    """The installed version of a package, '' when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)", text)
    return match.group(1) if match else ""
