"""Runs calls under limits of the kernel: a case that computes or allocates too much dies, however busy the machine is.

python -m hostile.limits MODULE     calls MODULE.CASES, {name: callable}, each in a fork of this process
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
from pathlib import Path

CPU_SECONDS = 3  # the promise is one second on a quiet machine; busy hyper-threads make it two
MEMORY = 100 * 2**20


def _size_now() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


def outcome(case) -> str:
    """'' where the case returned or raised one of pyquant's errors; else what happened instead."""
    from pyquant.errors import PyquantError

    pid = os.fork()
    if pid == 0:
        told, code = sys.stderr.fileno(), 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
            resource.setrlimit(resource.RLIMIT_AS, (_size_now() + MEMORY,) * 2)
            signal.alarm(120)  # a case that waits for something
            case()
            code = 0
        except PyquantError as error:
            code = 0 if len(str(error)) < 4000 else 2
            os.write(told, b"" if code == 0 else b"an error of many thousand characters\n")
        except BaseException as error:
            os.write(told, f"{type(error).__name__}: {str(error)[:200]}\n".encode("utf-8", "replace"))
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name} (time: SIGXCPU, SIGKILL, SIGALRM)"
    return "" if os.WEXITSTATUS(status) == 0 else "raised what is not pyquant's (above)"


def main(module: str) -> int:
    cases = importlib.import_module(module).CASES
    failed = 0
    for name, case in cases.items():
        found = outcome(case)
        if found:
            failed += 1
            print(f"{name}: {found}", flush=True)
    print(f"{len(cases)} cases, {failed} failed")
    return int(failed > 0 or not cases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
