"""Whether pyquant's CUDA runtime and torch's see the same GPUs, and if not, why.

pyquant links a CUDA runtime of its own, so that torch may work with a driver that is too old for pyquant.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SMALLEST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class GpuRuntime:
    """What torch and pyquant each see.

    torch_cuda     the CUDA that torch was built for, '' without
    torch_gpus     name and compute capability of each GPU that torch sees
    native_error   why pyquant._native cannot be loaded, '' when it is
    build          build_info() of the native module
    own_gpus       how many GPUs pyquant's runtime sees
    why_no_gpu     why that is none, '' when there is one
    driver_cuda    the newest CUDA that the driver serves, 12080 for 12.8; 0 without a driver
    """

    torch_cuda: str
    torch_gpus: tuple[tuple[str, tuple[int, int]], ...]
    native_error: str
    build: Mapping[str, Any]
    own_gpus: int
    why_no_gpu: str
    driver_cuda: int


def gpu_runtime() -> GpuRuntime:
    """Queries torch, pyquant's native module and the driver; nothing runs on a GPU."""
    native, error = _native()
    own_gpus = native.device_count() if native else 0
    return GpuRuntime(
        torch_cuda=torch.version.cuda or "",
        torch_gpus=_torch_gpus(),
        native_error=error,
        build=native.build_info() if native else {},
        own_gpus=own_gpus,
        why_no_gpu=native.why_no_device() if native and own_gpus == 0 else "",
        driver_cuda=native.driver_cuda_version() if native else 0,
    )


def gpu_problems(seen: GpuRuntime) -> list[str]:
    """What keeps the GPUs that torch sees from being used by pyquant, one sentence each; empty when nothing does."""
    if not seen.torch_gpus:
        return []
    problems = [
        f"{name} has compute capability {major}.{minor}, the CUDA kernels need "
        f"{SMALLEST_CAPABILITY[0]}.{SMALLEST_CAPABILITY[1]}"
        for name, (major, minor) in seen.torch_gpus
        if (major, minor) < SMALLEST_CAPABILITY
    ]
    sees = f"torch sees {len(seen.torch_gpus)} GPU{'s' if len(seen.torch_gpus) > 1 else ''}"
    if seen.native_error:
        problems.append(f"{sees}, but {seen.native_error}")
    elif not seen.build["cuda"]:
        problems.append(f"{sees}, but pyquant was built for CPUs only: {seen.build['why_no_cuda']} (docs/install.md)")
    elif seen.own_gpus == 0:
        problems.append(f"{sees}, but pyquant sees none: {seen.why_no_gpu} (docs/install.md)")
    return problems


def gpu_lines(seen: GpuRuntime) -> list[str]:
    """What there is to say of CUDA, problems aside: what torch and pyquant were built for, and the driver."""
    lines = []
    if not seen.torch_cuda:
        unused = f", though there {'is one' if seen.own_gpus == 1 else f'are {seen.own_gpus}'}" if seen.own_gpus else ""
        lines.append(f"torch has no CUDA: GPUs are not used{unused}")
    elif not seen.torch_gpus:
        lines.append(f"torch is built for CUDA {seen.torch_cuda}, but finds no GPU that it can use")
    if seen.native_error:
        return [*lines, seen.native_error]
    if not seen.build["cuda"]:
        return [*lines, f"pyquant was built for CPUs only: {seen.build['why_no_cuda']}"]
    lines.append(
        f"pyquant was built by nvcc {seen.build['nvcc']} for sm {seen.build['architectures'].replace(';', ', ')}; "
        f"its CUDA runtime {version(seen.build['cuda_runtime'])} needs driver {seen.build['minimum_driver']} or newer"
    )
    if seen.driver_cuda:
        lines.append(f"the driver serves CUDA {version(seen.driver_cuda)}")
    if seen.own_gpus == 0:
        lines.append(f"no GPU for pyquant: {seen.why_no_gpu}")
    return lines


def version(number: int) -> str:
    """A CUDA version as people write it."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _native() -> tuple[Any, str]:
    try:
        return importlib.import_module("pyquant._native"), ""
    except ImportError as error:
        return None, f"pyquant._native, the kernel table, cannot be imported: {error}"


def _torch_gpus() -> tuple[tuple[str, tuple[int, int]], ...]:
    if torch.version.cuda is None:
        return ()
    with warnings.catch_warnings():  # torch warns about a missing or old driver; here it is said in our own words
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count))
