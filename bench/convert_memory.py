"""Memory and files of `pyquant convert --scheme` beside `pyquant quantize`, which loads the whole model first; and the
memory of `from_pretrained` with PyquantConfig, in the files' type and in float32.

    python -m bench.convert_memory [--layers 12] [--width 1024] [--scheme SCHEME] [--batches N] [--improve gptq]
                                   [--only convert]

Writes a decoder of transformers (Llama, bfloat16, random weights) in several files into a temporary folder, runs both
commands on it in fresh processes, and prints the most memory that each had at once, above a process that only imports
pyquant and transformers. Both save in files of 16 MiB instead of 1 GiB: as many as a large model has. The saved folders
must be equal byte for byte. With --batches both are given so many batches of 4 windows of 64 random tokens: static
schemes and improvers then, and `convert` works block by block.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

_PEAK: Final = """
import re, sys
from pathlib import Path
import torch, transformers, pyquant
from pyquant.cli.main import main
from pyquant.io.checkpoint import save_checkpoint
from transformers import LlamaForCausalLM

save_checkpoint.__kwdefaults__["max_shard_bytes"] = 16 * 2**20
word = lambda name: int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = word("VmRSS")
status = main(sys.argv[1:])
print("peak", word("VmHWM") - before)
sys.exit(status)
"""
_TOKENS: Final = 8192
_DATA: Final = """
import torch

def batches():
    generator = torch.Generator().manual_seed(0)
    return [{{"input_ids": torch.randint({tokens}, (4, 64), generator=generator)}} for _ in range({batches})]
"""


_LOAD: Final = """
import re, sys
from pathlib import Path
import torch, transformers, pyquant
from pyquant.integrations.transformers import PyquantConfig
from transformers import AutoModelForCausalLM

word = lambda name: int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before, (folder, dtype, scheme) = word("VmRSS"), sys.argv[1:]
AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=PyquantConfig(scheme, check_speed=False))
print("peak", word("VmHWM") - before)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--scheme", default="W8A8Dynamic")
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--improve", nargs="+", default=[])
    parser.add_argument("--only", choices=("convert", "quantize"))
    args = parser.parse_args()
    if not Path("/proc/self/status").exists():
        print("the peak of a process is read from /proc, which is not here")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        floats = _written(home / "float", args.layers, args.width)
        how = ["--scheme", args.scheme]
        if args.batches:
            (home / "windows.py").write_text(_DATA.format(tokens=_TOKENS, batches=args.batches))
            how += ["--data", "windows:batches", *(["--improve", *args.improve] if args.improve else [])]
        words = {
            "convert": ["convert", str(home / "float"), str(home / "convert"), *how],
            "quantize": ["quantize", str(home / "float"), "--out", str(home / "quantize"), *how],
        }
        peaks = {name: _peak(_PEAK, home, *given) for name, given in words.items() if args.only in (None, name)}
        saved = [{f.name: f.read_bytes() for f in (home / name).iterdir()} for name in peaks]
        peaks = {f"pyquant {name}": peak for name, peak in peaks.items()}
        for dtype in () if args.batches or args.only else ("bfloat16", "float32"):  # it takes no data
            peaks[f"from_pretrained, {dtype}"] = _peak(_LOAD, home, str(home / "float"), dtype, args.scheme)
        quantised = sum(len(data) for name, data in saved[0].items() if name.endswith(".safetensors"))
        equal = all(files == saved[0] for files in saved)
        block = 2 * (4 + 3 * 3) * args.width**2
        print(f"float {floats / 2**20:.0f} MiB, {args.scheme} {quantised / 2**20:.0f} MiB; equal: {equal}")
        print(f"a block: {block / 2**20:.0f} MiB; what is outside of them: {2 * _TOKENS * args.width / 2**20:.0f} MiB")
        for name, peak in peaks.items():
            words = f"{peak / quantised:.2f} of the quantised files, {peak / floats:.2f} of the float ones"
            print(f"{name}: {peak / 2**20:.0f} MiB, {words}")
    return 0 if equal else 1


def _written(folder: Path, layers: int, width: int) -> int:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_TOKENS,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="64MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _peak(code: str, home: Path, *words: str) -> int:
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).resolve().parents[1]}"}
    command = [sys.executable, "-c", code, *words]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=home, env=environment)
    if found.returncode:
        raise SystemExit(found.stderr)
    return int(found.stdout.split("peak ")[-1])


if __name__ == "__main__":
    sys.exit(main())
