"""Python in a new process with the machine's default threads: what a user's first script meets."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOISE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


# Forks itself for each line of its input, a list of a folder and code; answers with the exit status.
_SERVER = """
import json, os, sys, traceback
import torch, pyquant, transformers
import transformers.models.auto.modeling_auto, transformers.models.bert.modeling_bert, transformers.quantizers.auto
print("ready", flush=True)
for line in sys.stdin:
    folder, out, err, code = json.loads(line)
    pid = os.fork()
    if pid:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    status = 1
    try:
        os.chdir(folder)
        for path, number in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    return kept | NOISE | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@functools.cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SERVER]
    found = subprocess.Popen(command, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None
    assert found.stdout.readline() == "ready\n", "it says why on stderr"
    return found


def with_transformers(code: str, cwd: Path) -> Any:
    """As python(), in a fork of a process that has imported pyquant and transformers and done nothing else: the import
    takes longer than what most codes do."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        server.stdin.write(json.dumps([str(cwd), str(out), str(err), code]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        assert status == 0, err.read_text()[-4000:]
        return json.loads(out.read_text().splitlines()[-1])


def python(code: str, cwd: Path) -> Any:
    """Runs code; its last line of output is JSON, which is returned. What it says on stderr is told when it fails."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
