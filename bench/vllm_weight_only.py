"""Weight-only layers in vLLM on a CPU: python -m bench.vllm_weight_only (vLLM in the environment: make nightly-vllm).

One checkpoint of W4A16, groups of 128, by vLLM's own kernel and by pyquant's, both in vLLM's ColumnParallelLinear and
filled by vLLM's loaders, interleaved in one run: times, and the error of each against float64. W8A16 has no kernel of
vLLM's on a CPU: its weights in floating point are the peer there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import torch

import pyquant
from pyquant.io.compressed_tensors import pack_to_int32
from pyquant.measure.timing import time_interleaved, using_threads

GROUP = 128


def vllm_layer(method: str, own: pyquant.QLinear, dtype: torch.dtype) -> Any:
    """A layer of vLLM with the codes of a QLinear; method '': its weights in floating point."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    n, k = own.out_features, own.in_features
    if not method:
        layer = ColumnParallelLinear(k, n, bias=False, prefix="fc", params_dtype=dtype)
        layer.weight.weight_loader(layer.weight, own.dequantised_weight().to(dtype))
    else:
        bits = own.scheme.weights.bits
        words = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
        group = {"targets": ["Linear"], "format": "pack-quantized", "weights": words}
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": []}
        quant = get_quantization_config(method).from_config({**config, "config_groups": {"group_0": group}})
        layer = ColumnParallelLinear(k, n, bias=False, quant_config=quant, prefix="fc", params_dtype=dtype)
        layer.weight_packed.weight_loader(layer.weight_packed, pack_to_int32(own.codes, bits))
        layer.weight_scale.weight_loader(layer.weight_scale, own.weight_scale)
        layer.weight_shape.weight_loader(layer.weight_shape, torch.tensor([n, k], device="cpu"))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def measured(bits: int, rows: int, k: int, n: int, dtype: torch.dtype) -> None:
    """Prints one line: times and errors of one size."""
    linear = torch.nn.Linear(k, n, bias=False)
    scheme = pyquant.W4A16(GROUP) if bits == 4 else pyquant.W8A16(GROUP)
    own = pyquant.QLinear.from_float(linear, scheme)
    own = pyquant.QLinear.from_codes(own.codes, own.weight_scale.bfloat16().float(), scheme=own.scheme)  # as vLLM's are
    x = torch.randn(rows, k, device="cpu").to(dtype)
    exact = x.double() @ own.dequantised_weight().double().t()
    layers = {"vLLM": vllm_layer("compressed-tensors" if bits == 4 else "", own, dtype)}
    layers["pyquant"] = vllm_layer("pyquant", own, dtype)
    candidates = {name: (lambda layer=layer: layer(x)[0]) for name, layer in layers.items()}
    errors = {name: float((run().double() - exact).norm() / exact.norm()) for name, run in candidates.items()}
    times = time_interleaved(candidates, rounds=31)
    theirs = "cpu_gemm_wna16" if bits == 4 else "floating point"
    told = ", ".join(f"{name} {times.median_us(name):8.1f} us, error {errors[name]:.1e}" for name in candidates)
    print(
        f"W{bits}A16 {str(dtype).removeprefix('torch.'):8} {rows:4} x {k} x {n}: {told}; "
        f"vLLM ({theirs}) over pyquant {times.ratio('vLLM', 'pyquant'):.2f}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_weight_only", description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the machine's)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512], metavar="M", help="tokens of a call")
    parser.add_argument("--size", type=int, nargs=2, default=[2048, 2048], metavar=("K", "N"), help="of the layer")
    args = parser.parse_args(argv)
    os.environ["PYQUANT_VLLM"] = "last"  # vLLM's own kernel serves its own reader
    with using_threads(args.threads):
        from pyquant.integrations import vllm as plugin

        plugin.register()
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()), torch.inference_mode():
            init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
            initialize_model_parallel(1)
            for bits in (4, 8):
                for dtype in (torch.bfloat16, torch.float16):  # vLLM's kernel has no float32
                    for rows in args.rows:
                        measured(bits, rows, *args.size, dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
