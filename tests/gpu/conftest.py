"""One device for all kernel tests: the PTX simulator when PYQUANT_CUDART_SIM names one, else a GPU, else a skip with
the reason. In continuous integration (CI=true) with a simulator named, there is no skip."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterator

import kernel_families
import machine_code
import pytest
from cuda_ops import CudaOps, cuda_ops
from gpu_device import MODES, Memory, memory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def native():
    _native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    if not _native.build_info()["cuda"]:
        pytest.skip("pyquant was built without CUDA kernels")
    return _native


@pytest.fixture(scope="session")
def _device() -> Memory:
    found = memory()
    if isinstance(found, str):
        if os.environ.get("CI") == "true" and os.environ.get("PYQUANT_CUDART_SIM"):
            pytest.fail(found)
        pytest.skip(found)
    return found


@pytest.fixture(params=list(MODES))
def device(request: pytest.FixtureRequest, _device: Memory) -> Iterator[Memory]:
    """Memory of the device, in each of the simulator's modes."""
    if request.param != "plain" and not _device.is_simulator:
        pytest.skip("a GPU has one way to run")
    _device.mode(request.param)
    yield _device
    _device.mode("plain")
    _device.free()


@pytest.fixture
def plain_device(_device: Memory) -> Iterator[Memory]:
    """Memory of the device, in the simulator's quickest mode."""
    _device.mode("plain")
    yield _device
    _device.free()


@pytest.fixture(scope="session")
def _cuda_ops() -> CudaOps:
    found = cuda_ops()
    if isinstance(found, str):
        if os.environ.get("CI") == "true" and os.environ.get("PYQUANT_CUDART_SIM"):
            pytest.fail(found)
        pytest.skip(found)
    return found


@pytest.fixture
def there(_cuda_ops: CudaOps) -> CudaOps:
    """torch.ops.pyquant as the device serves it, in the simulator's quickest mode."""
    _cuda_ops.mode("plain")
    return _cuda_ops


@pytest.fixture(params=list(MODES))
def anywhere(request: pytest.FixtureRequest, there: CudaOps) -> Iterator[CudaOps]:
    """The same in each of the simulator's modes."""
    if request.param != "plain" and not there.is_simulator:
        pytest.skip("a GPU has one way to run")
    there.mode(request.param)
    yield there
    there.mode("plain")


@pytest.fixture
def simulated(there: CudaOps) -> CudaOps:
    """The same on the simulator alone."""
    if not there.is_simulator:
        pytest.skip("the simulator counts; a GPU's profiler is another tool")
    return there


@pytest.fixture(scope="session")
def tool() -> str:
    if not kernel_families.NATIVE.build_info()["cuda"]:
        pytest.skip("pyquant was built without CUDA kernels")
    tool = machine_code.cuobjdump()
    if tool is None:
        if os.environ.get("CI") == "true":
            pytest.fail("continuous integration must install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
        pytest.skip("cuobjdump and nvdisasm are not there (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)")
    return tool


@pytest.fixture(scope="session")
def usage(tool: str) -> dict[machine_code.Key, machine_code.Usage]:
    """Of every kernel."""
    return machine_code.usage(tool, kernel_families.LIBRARY)


@pytest.fixture(scope="session")
def functions(tool: str, usage: dict) -> dict[machine_code.Key, collections.Counter[str]]:
    """Of the kernels that are read (tests/support/kernel_families.py)."""
    # what another process does not make for test_step_budgets.py meanwhile, first
    found = machine_code.read(tool, kernel_families.LIBRARY, kernel_families.others(usage))
    return found | machine_code.read(tool, kernel_families.LIBRARY, kernel_families.measured(usage))


@pytest.fixture(scope="session")
def measured(tool: str, usage: dict) -> Callable[[str, str], dict[str, list[machine_code.Line]]]:
    """Of an architecture, the listings of the kernels that a pattern names."""
    return functools.partial(machine_code.listings, tool, kernel_families.LIBRARY, kernel_families.measured(usage))


@pytest.fixture(scope="session")
def decode_kernels(measured: Callable) -> dict[str, list[machine_code.Line]]:
    return measured("sm_90a", "decode_kernel")


@pytest.fixture(scope="session")
def decode_kernels_of_sm80(measured: Callable) -> dict[str, list[machine_code.Line]]:
    return measured("sm_80", "decode_kernel")


@pytest.fixture(scope="session")
def wgmma_kernels(measured: Callable) -> dict[str, list[machine_code.Line]]:
    kernels = measured("sm_90a", "GemmUniversal|gemm_(groups|weight_only)90_kernel")
    return kernels or pytest.skip("no kernel of sm_90a is built")


@pytest.fixture(scope="session")
def mma_kernels(measured: Callable) -> dict[str, list[machine_code.Line]]:
    """Of the families whose epilogue is csrc/cuda/gemm/plain80.cuh and a general one behind it."""
    kernels = measured("sm_80", r"GemmWithEpilogueVisitor|gemm_\w+80_kernel")
    return kernels or pytest.skip("no kernel of sm_80 is built")
