# ruff: noqa: E501  (a table of source lines)

"""Bugs in the CPU engine that no result of a small layer shows, each one edit of a source file; the check packs and
runs a layer above the packer's grain, with three threads, into memory that was full of something else."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from made_once import made_once
from mutants import Plant, register

from csrc import cpu_engine as engine

N, K = 2080, 1030  # three shares of 11 blocks, the last block half full
# Parsing these takes longer than compiling most of the files: a bug's files begin with them, compiled before.
_HEADERS = ("algorithm", "cmath", "cstdint", "cstring", "functional", "stdexcept", "string", "thread", "vector")
_AS_WRITTEN = "-O0"  # what is edited: the quickest to compile
shared: Path | None = None  # folder_of_the_run, in a run
_library: Path | None = None


@functools.cache
def _own() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="planted_engine")


def _made(name: str, make: Callable[[Path], object]) -> Path:
    return made_once(shared or Path(_own().name), name, make)


def engine_folder() -> Path:
    """Every object file and the library without a bug, compiled once for all bugs."""
    return _made("cpu_engine_objects", engine.compile_for_edits)


def precompiled(flags: Sequence[str]) -> tuple[str, ...]:
    """Words for a compiler, called with these flags too, to have the standard headers ready."""

    def make(folder: Path) -> None:
        (folder / "headers.h").write_text("".join(f"#include <{name}>\n" for name in _HEADERS))
        command = [str(engine.compiler()), *flags, "-x", "c++-header", "headers.h"]
        subprocess.run([*command, "-o", "headers.h.gch"], cwd=folder, check=True)

    return ("-include", str(_made("headers" + "".join(flags), make) / "headers.h"))


def whole() -> Path:
    """The library without a bug, or with the one that is planted."""
    return _library or engine_folder() / "libcpu_engine.so"


def edit_engine(*edits: tuple[str, str, str]) -> Plant:
    """(file, old, new): edits of csrc/cpu/<file>; of a header, together with linear.cpp, which is compiled against it."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        global _library
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "cpu").mkdir()
            for file in dict.fromkeys(file for file, _, _ in edits):
                text = (engine.ROOT / "csrc/cpu" / file).read_text()
                for _, old, new in (edit for edit in edits if edit[0] == file):
                    if text.count(old) != 1:
                        raise ValueError(f"{file} holds {text.count(old)} times: {old}")
                    text = text.replace(old, new)
                (folder / "cpu" / file).write_text(text)
            sources = sorted((folder / "cpu").glob("*.cpp")) or [engine.ROOT / "csrc/cpu/linear.cpp"]
            includes = (f"-I{folder}", f"-I{engine_folder() / 'include'}")
            flags = (*includes, _AS_WRITTEN, *precompiled((*engine.FLAGS, _AS_WRITTEN)))
            changed = [engine.compile_one(source, folder, flags) for source in sources]
            names = {path.name for path in changed}
            # first what has the bug: of an inline function that several files hold, the first one's is linked
            parts = [*changed, *(path for path in engine_folder().glob("*.o") if path.name not in names)]
            _library = engine.link(folder / "libcpu_engine.so", parts, "-shared")
            try:
                yield
            finally:
                _library = None

    return plant


@contextlib.contextmanager
def three_threads() -> Iterator[ctypes.CDLL]:
    """The engine with the bug that is planted, if one is."""
    library = engine.load(whole())
    library.t_threads(3)
    try:
        yield library
    finally:
        library.t_threads(1)


def check(seed: int) -> None:
    """Packs into two kinds of old bytes, reads the codes back, and multiplies by a row of zeros and one that underflows."""
    with three_threads() as library:
        _check(library, np.random.default_rng(seed))


def in_a_child(check: Callable[[int], None], seed: int) -> None:
    """check(seed) in a process of its own, for bugs that end the process they are in."""
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.disable()  # an abort that was planted is no news in the log
            signal.alarm(120)
            check(seed)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "a child that packs and multiplies ended otherwise"


def check_in_a_child(seed: int) -> None:
    """check(), as in_a_child."""
    in_a_child(check, seed)


def _check(library: ctypes.CDLL, rng: np.random.Generator) -> None:
    spec = (ctypes.c_int64 * 16)(N, K, 8, 0, 0, -127, 127, 1, 0, 0, 0, 0, 0, -127, 127, 0)
    codes = rng.integers(-127, 128, (N, K)).astype(np.int8)
    scale = np.full(N, 1e-30, np.float32)
    size = library.t_packed_bytes(spec)
    buffers = []
    for old in (0x00, 0x5A):
        buffer = np.full(size + 64, old, np.uint8)
        pointers = [engine.at(a) for a in (codes, scale, None, None, None, None, None, buffer)]
        library.t_pack_linear(spec, *pointers)
        assert (buffer[size:] == old).all(), "packed beyond packed_bytes"
        buffers.append(buffer[:size])
    assert np.array_equal(*buffers), "the packer leaves old bytes"
    back = np.empty_like(codes)
    library.t_unpack_linear(spec, engine.at(buffers[0]), engine.at(back))
    assert np.array_equal(back, codes), "other codes than were packed"
    # 1e-30 * 1e-30 is below the smallest number: the sum's sign stays, and an absent bias is -0, which keeps it
    x = np.concatenate([np.full((1, K), 1e-30), rng.standard_normal((1, K)) * 1e-28]).astype(np.float32)
    out = np.ones((2, N), np.float32)
    none, rows, width = engine.at(None), ctypes.c_int64(2), ctypes.c_int64
    library.t_linear(
        spec,
        engine.at(buffers[0]),
        engine.at(x),
        engine.F32,
        rows,
        width(K),
        none,
        engine.F32,
        width(N),
        engine.at(out),
        engine.F32,
    )
    recip = np.float32(1) / (np.abs(x).max(axis=1) / np.float32(127))
    q = np.rint(x * recip[:, None]).astype(np.int64)
    sums = q @ codes.astype(np.int64).T
    assert (out == 0).all(), "an underflowing product is zero"
    assert np.array_equal(np.signbit(out), sums < 0), "an absent bias changed the sign of a zero"


EDITS = [
    (
        "linear.cpp",
        "for (int64_t b = share.begin; b < share.end; ++b) {",
        "for (int64_t b = share.begin; b < share.end - (share.index > 0); ++b) {",
        "threaded packing drops blocks",
    ),
    (
        "linear.cpp",
        "for (int64_t b = share.begin; b < share.end; ++b) {",
        "for (int64_t b = share.begin; b + (share.index > 0) < share.end; ++b) {",
        "threaded packing drops each later share's last block",
    ),
    ("linear.cpp", ": -0.f;", ": 0.f;", "an absent bias is +0"),
    (
        "threads.h",
        "const int64_t each = units_ / count_, more = units_ % count_;",
        "const int64_t each = units_ / count_, more = 0;",
        "shares forget what does not divide",
    ),
    (
        "threads.h",
        "return {i, begin, begin + each + (i < more ? 1 : 0)};",
        "return {i, begin, begin + each};",
        "longer shares end early",
    ),
]

# The packer that shipped before the pool handed out shares: each worker asked how many of them there are. torch's pool
# answers 1 to a worker, so that the second took the blocks behind the layer's last. Today asking ends the process.
_ASKS = (
    (
        "linear.cpp",
        "for (int64_t b = share.begin; b < share.end; ++b) {",
        "const int64_t tasks = std::min(spec.n * spec.k / kPackGrain, thread_count()); for (int64_t b = s.blocks * share.index / tasks; b < s.blocks * (share.index + 1) / tasks; ++b) {",
    ),
)
_ANSWERS = (("threads.cpp", "  if (in_body) throw std::logic_error(", "  if (false) throw std::logic_error("),)
ENDING = [
    (_ASKS, "a worker of the packer asks for the number of threads"),
    (_ASKS + _ANSWERS, "a worker of the packer asks for the number of threads, and the pool answers"),
]

if engine.compiler() is not None:  # without one the engine itself is not tested, with that reason
    for _file, _old, _new, _name in EDITS:
        register(edit_engine((_file, _old, _new)), check, name=_name, area=f"csrc/cpu/{_file}")
    for _edits, _name in ENDING:
        register(edit_engine(*_edits), check_in_a_child, name=_name, area="csrc/cpu/linear.cpp")
