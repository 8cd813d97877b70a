"""Builds the test kernels with nvcc and runs them through ptxsim from Python.

Environment: PTXSIM_LIB (libcudart.so.13) and PTXSIM_TEST_BUILD (where the test kernels' libraries go), by default those
of `make simulator`; CUTLASS_DIR (a folder that holds include/ and tools/util/include/), by default the nvidia-cutlass
package's.
"""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parents[2] / "build" / "ptxsim"
LIBRARY = Path(os.environ.get("PTXSIM_LIB", DEFAULT / "libcudart.so.13"))
BUILD = Path(os.environ.get("PTXSIM_TEST_BUILD", DEFAULT / "tests"))
NVCC = shutil.which("nvcc") or "nvcc"


def cutlass_dir() -> Path | None:
    if named := os.environ.get("CUTLASS_DIR"):
        return Path(named)
    spec = importlib.util.find_spec("cutlass_library")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (source := Path(folder) / "source" / "include").exists():
            return source.parent
    return None


@dataclass(frozen=True)
class Library:
    """Test kernels of one source; a generator (.py) writes it into the build folder when called with its arguments."""

    source: str
    arch: str
    arguments: tuple[str, ...] = ()

    @property
    def needs_cutlass(self) -> bool:
        return self.source.startswith("cutlass/")


LIBS = {
    "instr": Library("kernels/instr.cu", "90a"),
    "negative": Library("kernels/negative.cu", "90a"),
    "quant": Library("kernels/quant.cu", "90a"),
    "counters": Library("kernels/counters.cu", "90a"),
    "wgmma_few": Library("kernels/wgmma_all.py", "90a", ("5",)),  # every fifth N
    "wgmma_all": Library("kernels/wgmma_all.py", "90a", ("1",)),
    "cub_algos": Library("kernels/cub_algos.cu", "90a"),
    "sm80_s8": Library("cutlass/sm80_s8.cu", "80"),
    "sm80_s4": Library("cutlass/sm80_s4.cu", "80"),
    "sm80_f16": Library("cutlass/sm80_f16.cu", "80"),
    "sm80_evt": Library("cutlass/sm80_evt.cu", "80"),
    "sm90_f16": Library("cutlass/sm90_f16.cu", "90a"),
    "sm90_misc": Library("cutlass/sm90_misc.cu", "90a"),
    "sm90_s8_evt": Library("cutlass/sm90_s8_evt.cu", "90a"),
    "sm90_mixed": Library("cutlass/sm90_mixed.cu", "90a"),
    "sm90_grouped": Library("cutlass/sm90_grouped.cu", "90a"),
}


def nvcc_command(lib: Library, source: Path, out: Path) -> list[str]:
    cmd = [NVCC, "-std=c++17", "-O3", "--expt-relaxed-constexpr", "--extended-lambda", "-no-compress", "-lineinfo"]
    cmd += ["-gencode", f"arch=compute_{lib.arch},code=compute_{lib.arch}"]
    cmd += ["-cudart", "shared", "-shared", "-Xcompiler", "-fPIC", "-I", str((HERE / lib.source).parent)]
    if lib.needs_cutlass:
        c = cutlass_dir()
        assert c is not None
        cmd += ["-I", str(c / "include"), "-I", str(c / "tools" / "util" / "include")]
    return [*cmd, str(source), "-o", str(out)]


@contextlib.contextmanager
def locked(path: Path):
    """One process at a time; the others find its work done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_lib(name: str) -> Path:
    """The library's path. Raises what nvcc said when it does not compile."""
    lib, out = LIBS[name], BUILD / f"{name}.so"
    origin = HERE / lib.source
    with locked(BUILD / f"{name}.lock"):
        inputs = [origin, Path(__file__), *origin.parent.glob("*.h")]
        if out.exists() and all(out.stat().st_mtime > s.stat().st_mtime for s in inputs):
            return out
        source = origin
        if origin.suffix == ".py":
            source = BUILD / f"{name}.cu"
            subprocess.run([sys.executable, str(origin), str(source), *lib.arguments], check=True)
        fresh = BUILD / f"{name}.fresh.so"
        done = subprocess.run(nvcc_command(lib, source, fresh), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-3000:]}")
        fresh.rename(out)
    return out


def compile_all(names):
    """Several at once; they are kept, so that this costs nothing the next time."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(compile_lib, names), strict=True))


class Sim:
    """The simulated runtime: device buffers, configuration, reports."""

    def __init__(self):
        self.rt = ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)
        self.rt.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.rt.cudaFree.argtypes = [ctypes.c_void_p]
        self.rt.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.rt.ptxsim_last_report.restype = ctypes.c_char_p
        self.rt.ptxsim_summary.restype = ctypes.c_char_p
        self.rt.ptxsim_config.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self.libs = {}
        self.bufs = []

    def lib(self, name):
        if name not in self.libs:
            self.libs[name] = ctypes.CDLL(str(compile_lib(name)))
        return self.libs[name]

    def config(self, **kw):
        for k in ("PTXSIM_ASYNC", "PTXSIM_SCHED", "PTXSIM_CHECK", "PTXSIM_STATS", "PTXSIM_SUMMARY"):
            v = kw.get(k[7:].lower())
            self.rt.ptxsim_config(k.encode(), None if v is None else str(v).encode())

    def summary(self):
        """Counters since the last ptxsim_summary_reset(), under PTXSIM_SUMMARY."""
        return json.loads(self.rt.ptxsim_summary())

    def empty(self, nbytes):
        p = ctypes.c_void_p()
        assert self.rt.cudaMalloc(ctypes.byref(p), nbytes) == 0, self.report()
        self.bufs.append(p)
        return p

    def dev(self, a):
        a = np.ascontiguousarray(a)
        p = self.empty(a.nbytes)
        assert self.rt.cudaMemcpy(p, a.ctypes.data, a.nbytes, 1) == 0
        return p

    def host(self, p, shape, dtype):
        a = np.empty(shape, dtype)
        assert self.rt.cudaMemcpy(a.ctypes.data, p, a.nbytes, 2) == 0
        return a

    def free(self):
        for p in self.bufs:
            self.rt.cudaFree(p)
        self.bufs = []

    def report(self):
        return (self.rt.ptxsim_last_report() or b"").decode()

    def reset(self):
        self.rt.ptxsim_reset()
        self.free()


if __name__ == "__main__":
    compile_all(sys.argv[1:] or list(LIBS))
