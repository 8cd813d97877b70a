"""The simulated runtime for every test, and the kernels that a test says it needs: `@pytest.mark.needs("instr")`."""

import os
import shutil

import harness
import pytest

NIGHTLY = os.environ.get("PYQUANT_NIGHTLY", "") not in ("", "0")


def needs(item):
    return [name for mark in item.iter_markers("needs") for name in mark.args]


def why_not(item):
    if item.get_closest_marker("nightly") and not NIGHTLY:
        return "nightly: runs with PYQUANT_NIGHTLY=1 (make nightly)"
    if shutil.which("nvcc") is None:
        return "nvcc is not installed"
    if any(harness.LIBS[name].needs_cutlass for name in needs(item)) and harness.cutlass_dir() is None:
        return "CUTLASS's headers are not there: pip install --no-deps nvidia-cutlass, or name them with CUTLASS_DIR"
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if reason := why_not(item):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def session_sim():
    return harness.Sim()


@pytest.fixture(scope="module")
def compiled(request):
    """What this module's tests need, compiled in parallel."""
    items = [i for i in request.session.items if i.module is request.module and not i.get_closest_marker("skip")]
    return harness.compile_all(sorted({name for item in items for name in needs(item)}))


@pytest.fixture
def sim(session_sim, compiled):
    session_sim.reset()
    session_sim.config()
    yield session_sim
    session_sim.config()
    session_sim.reset()
