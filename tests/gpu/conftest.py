"""One device for all kernel tests: the PTX simulator when PYQUANT_CUDART_SIM names one, else a GPU, else a skip with
the reason. In continuous integration (CI=true) with a simulator named, there is no skip."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
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
