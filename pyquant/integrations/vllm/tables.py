"""register() where vLLM is there: pyquant's kernels in vLLM's lists, and its quantisation method."""

from __future__ import annotations

from typing import Any, Final

import vllm.model_executor.kernels.linear as linear
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.platforms import PlatformEnum

from pyquant.integrations.vllm.config import METHOD, PyquantConfig
from pyquant.integrations.vllm.kernels import PyquantInt8LinearKernel, PyquantMixedLinearKernel
from pyquant.integrations.vllm.layer import logger

# kind of a kernel, as register_linear_kernel calls it -> the list that it appends to
_LISTS: Final[dict[str, tuple[str, Any]]] = {
    "int8": ("_POSSIBLE_INT8_KERNELS", PyquantInt8LinearKernel),
    "mp": ("_POSSIBLE_KERNELS", PyquantMixedLinearKernel),
}


def register(*, first: bool) -> None:
    """Put each kernel first or last among those of CPUs and CUDA GPUs, once; register the method `pyquant`.

    Raises ImportError where this vLLM keeps its kernels otherwise.
    """
    for kind, (name, kernel) in _LISTS.items():
        lists = getattr(linear, name, None)
        if lists is None or not hasattr(linear, "register_linear_kernel"):
            raise ImportError(
                f"vllm has no {name} or register_linear_kernel; docs/vllm.md names the versions that have"
            )
        for platform in (PlatformEnum.CPU, PlatformEnum.CUDA):
            if kernel in lists.get(platform, ()):
                lists[platform].remove(kernel)
            linear.register_linear_kernel(kernel, platform, kind)
            if first:
                lists[platform].insert(0, lists[platform].pop())
    register_quantization_config(METHOD)(PyquantConfig)
    place = "first" if first else "last (PYQUANT_VLLM=prefer: first)"
    names = " and ".join(kernel.__name__ for _, kernel in _LISTS.values())
    logger.info("pyquant: %s stand %s among the kernels; quantization='%s' is known", names, place, METHOD)
