"""What vLLM's layer adds to pyquant's op: python -m bench.vllm_layer (vLLM in the environment: make nightly-vllm).

One row through a small layer, where the op takes least: microseconds of the op alone, of QLinear, and of vLLM's
ColumnParallelLinear with each quantisation method, interleaved in one run. Goal: at most 10 microseconds over the op.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from typing import Any

import torch

import pyquant
from pyquant.measure.timing import time_interleaved, using_threads

K, N, GOAL_US = 256, 256, 10.0
TARGETS = {"targets": ["Linear"], "format": "int-quantized"}
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def vllm_layer(method: str, own: pyquant.QLinear) -> Any:
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    groups = {"group_0": {**TARGETS, "weights": WEIGHTS, "input_activations": INPUTS}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": [], "config_groups": groups}
    quant = get_quantization_config(method).from_config(config)
    layer = ColumnParallelLinear(K, N, bias=False, quant_config=quant, prefix="fc", params_dtype=torch.float32)
    layer.weight.weight_loader(layer.weight, own.codes)
    layer.weight_scale.weight_loader(layer.weight_scale, own.weight_scale.reshape(-1, 1))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def main(argv: list[str] | None = None) -> int:
    """Prints the table. -> 1 where the goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_layer", description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the machine's)")
    with using_threads(parser.parse_args(argv).threads):
        return compare()


def compare() -> int:
    """As main, with the threads that are set."""
    os.environ["PYQUANT_VLLM"] = "prefer"
    from pyquant.integrations import vllm as plugin

    plugin.register()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    own = pyquant.QLinear.from_float(torch.nn.Linear(K, N, bias=False), pyquant.W8A8Dynamic())
    x = torch.randn(1, K, device="cpu")
    op, storage, spec = torch.ops.pyquant.qlinear.default, own.storage, own._spec
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        initialize_model_parallel(1)
        layers = {method: vllm_layer(method, own) for method in ("compressed-tensors", "pyquant")}
        candidates = {"op": lambda: op(x, storage, None, spec), "QLinear": lambda: own(x)}
        candidates |= {f"vLLM, {method}": (lambda layer=layer: layer(x)[0]) for method, layer in layers.items()}
        assert all(torch.equal(run(), own(x)) for run in candidates.values())
        times = time_interleaved(candidates, rounds=101)
    worst = 0.0
    for name in candidates:
        over = statistics.median(a - b for a, b in zip(times.samples[name], times.samples["op"])) * 1e6
        worst = max(worst, over)
        print(f"{name:26} {times.median_us(name):6.1f} us, {over:+5.1f} us over the op")
    print(f"M = 1, K = {K}, N = {N}, {torch.get_num_threads()} threads; goal: at most {GOAL_US:.0f} us over the op")
    return int(worst > GOAL_US)


if __name__ == "__main__":
    sys.exit(main())
