"""Coverage-guided fuzzing of all that reads untrusted bytes: tools/fuzz.py [--seconds 600] [--jobs N] [TARGET ...]

Needs atheris (pip install atheris). Each target of tests/fuzz/targets.py runs in a process of its own, from the seeds
in tests/fuzz/seeds; what it finds interesting is kept under build/fuzz, a failing input is written there and named. One
input may take 10 s and 2 GiB. Exits 1 when a target failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support")]


def run_one(name: str, seconds: int) -> None:
    """Fuzz in this process; libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["pyquant.recipe", "pyquant.io", "pyquant.core.patterns"]):
        from fuzz import targets

    corpus = ROOT / "build" / "fuzz" / name
    corpus.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        "-timeout=10",
        "-rss_limit_mb=2048",
        f"-artifact_prefix={corpus.parent}/{name}-",
    ]
    options += ["-print_final_stats=1", "-verbosity=0", "-max_len=4096"]
    atheris.Setup([sys.argv[0], *options, str(corpus), str(targets.SEEDS / name)], targets.TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help="names of tests/fuzz/targets.py; all by default")
    parser.add_argument("--seconds", type=int, default=600, help="for each target (default: 600)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets at a time (default: the cores)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one, args.seconds)
        return 0
    from fuzz import targets

    names = args.targets or list(targets.TARGETS)
    unknown = set(names) - set(targets.TARGETS)
    if unknown:
        parser.error(f"unknown target {min(unknown)!r}; there are: {', '.join(targets.TARGETS)}")

    def fails(name: str) -> bool:
        print(f"fuzz: {name}, {args.seconds} s", flush=True)
        command = [sys.executable, __file__, "--one", name, "--seconds", str(args.seconds)]
        return subprocess.run(command, check=False).returncode != 0

    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        failed = [name for name, bad in zip(names, pool.map(fails, names), strict=True) if bad]
    print(f"fuzz: {len(names)} targets, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
