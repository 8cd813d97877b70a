"""A whole engine of vLLM on a CPU: python engine.py CASE FOLDER. Prints what it found as one line of JSON.

A small Llama with random weights is quantised, saved by save_pretrained and started by vllm.LLM. Beside it the
quantised model runs in transformers: the same tokens, nearly the same log-probabilities (attention and norms are
vLLM's own), and to the bit the same results of every quantised layer. The products that a pass through the model runs
are counted, and once more after one layer was put into floating point behind everybody's back.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import pyquant

# scheme, quantization= of vllm.LLM (None: what the file says), and what else is asked of LLM, Llama and quantize_
CASES: dict[str, dict[str, Any]] = {
    "own reader": {"scheme": "W8A8Dynamic", "method": None},
    "compiled": {"scheme": "W8A8Dynamic", "method": "pyquant", "enforce_eager": False},
    "static": {"scheme": "W8A8(symmetric_inputs=False)", "method": "pyquant", "data": True},
    "4 bits": {"scheme": "W4A8Dynamic(group_size=32)", "method": "pyquant"},
    "affine weights, head, biases": {
        "scheme": "W4A16(group_size=32, symmetric=False)",
        "method": "pyquant",
        "heads": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "embeddings": {"scheme": "W8A8Dynamic", "method": "pyquant", "embeddings": True, "enforce_eager": False},
    "bfloat16": {"scheme": "W4A8Dynamic(group_size=32)", "method": "pyquant", "dtype": "bfloat16"},
    "experts": {"scheme": {"lm_head": None, "_default": "W8A8Dynamic"}, "method": "pyquant"},
    "4-bit experts": {"scheme": {"lm_head": None, "_default": "W4A16(group_size=32)"}, "method": "pyquant"},
    "experts, two ranks": {
        "scheme": {"lm_head": None, "_default": "W4A16(group_size=32)"},
        "method": "pyquant",
        "tensor_parallel_size": 2,
    },
    "experts, expert parallel": {
        "scheme": {"lm_head": None, "_default": "W4A16(group_size=32)"},
        "method": "pyquant",
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
    },
    "float experts": {"scheme": {"*.experts*": None, "lm_head": None, "_default": "W8A8Dynamic"}, "method": "pyquant"},
    "two ranks": {"scheme": "W8A16", "method": "pyquant", "tensor_parallel_size": 2},
}
PROMPT, NEW = [1, 5, 9, 33, 100, 7, 250], 12


def model_of(case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    is_mixture = isinstance(case["scheme"], dict)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if is_mixture else {}
    config = (MixtralConfig if is_mixture else LlamaConfig)(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=256,
        initializer_range=0.1,
        attention_bias=case.get("attention_bias", False),
        mlp_bias=case.get("mlp_bias", False),
        **experts,
    )
    model = (
        (MixtralForCausalLM if is_mixture else LlamaForCausalLM)(config)
        .to(getattr(torch, case.get("dtype", "float32")))
        .eval()
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # vLLM holds biases in the model's type
            torch.nn.init.normal_(parameter, std=0.5)
    data = [torch.randint(320, (1, 16)) for _ in range(4)] if case.get("data") else None
    options = {name: case.get(name, False) for name in ("heads", "embeddings")}
    return pyquant.quantize_(model, case["scheme"], data=data, **options)


def layers_of(vllm_model: Any) -> dict[str, Any]:
    """{name in the file, or of matrices that vLLM joined: layer} of those that pyquant runs, in this process."""
    found = {name: m for name, m in vllm_model.named_modules() if hasattr(m, "pyquant")}
    joined = {"qkv_proj": "q_proj k_proj v_proj", "gate_up_proj": "gate_proj up_proj"}
    names = [name.rpartition(".") for name in found]
    members = [[f"{start}{dot}{one}" for one in joined.get(last, last).split()] for start, dot, last in names]
    return dict(zip(map(tuple, members), found.values()))  # type: ignore[arg-type]


def experts_equal(model: Any, name: str, theirs: Any, dtype: torch.dtype) -> int:
    """How many layers of a bank of the checkpoint vLLM runs with the same bits: all or none."""
    number = int(name.split(".")[2])
    bank = model.model.layers[number].mlp.experts
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, bank.hidden_size, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(bank.num_experts, generator=generator)[:2] for _ in x])
    weights = torch.rand(9, 2, generator=generator)
    got = theirs.quant_method.apply(theirs, x, weights, ids.int(), None, None)
    return 2 * bank.num_experts * torch.equal(got, bank(x, ids, weights))


def equal_bits(model: Any, vllm_model: Any, dtype: torch.dtype) -> tuple[int, int]:
    """(layers of the checkpoint that vLLM runs with the same bits, all of them)."""
    equal, quantised = 0, [n for n, m in model.named_modules() if isinstance(m, (pyquant.QLinear, pyquant.QEmbedding))]
    for names, theirs in layers_of(vllm_model).items():
        if hasattr(theirs, "expert_map"):
            equal += experts_equal(model, names[0], theirs, dtype)
            continue
        ours = [model.get_submodule(name) for name in names]
        if isinstance(ours[0], pyquant.QEmbedding):
            ids = torch.arange(ours[0].num_embeddings)
            equal += torch.equal(theirs(ids), ours[0](ids))
            continue
        x = torch.randn(9, ours[0].in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
        bias = getattr(theirs, "bias", None)
        got = theirs.quant_method.apply(theirs, x, None if names == ("lm_head",) else bias)
        equal += len(names) * torch.equal(got, torch.cat([layer(x) for layer in ours], -1))
    return equal, len(quantised)


# Every op by which vLLM 0.32 multiplies matrices on a CPU, as torch's profiler names it.
FLOAT_OPS = ("_C::cpu_fused_moe", "aten::mm", "aten::addmm", "aten::bmm", "_C::onednn_mm", "_C::weight_packed_linear")
VLLM_OPS = ("_C::onednn_scaled_mm", "_C::cpu_gemm_wna16", "_C::int8_scaled_mm_with_quant", "_C::int4_scaled_mm_cpu")
OPS = {
    "integers": ("pyquant::qlinear", "pyquant::_grouped_linear"),
    "weight-only": ("pyquant::_weight_only", "pyquant::_grouped_weight_only"),
    "rows of codes": ("pyquant::dequantize",),
}
STEPS = 3


def counted(llm: Any) -> dict[str, float]:
    """{what runs: how often in a pass through the model}, by torch's count of the ops that ran in STEPS passes."""
    from vllm import SamplingParams

    options = SamplingParams(max_tokens=STEPS, temperature=0, detokenize=False, ignore_eos=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        llm.generate([{"prompt_token_ids": [5, 4, 3, 2, 1]}], options, use_tqdm=False)
    ran = {event.key: event.count / STEPS for event in profile.key_averages()}
    found = {what: sum(ran.get(op, 0) for op in ops) for what, ops in OPS.items()}
    found["floating point"] = sum(ran.get(op, 0) for op in FLOAT_OPS)
    found["vLLM's kernel"] = sum(ran.get(op, 0) for op in VLLM_OPS)
    return {what: count for what, count in found.items() if count}


def put_into_floats(vllm_model: Any) -> None:
    """The bug that the count is there for: a layer multiplies real numbers, and everything works."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    layer = vllm_model.model.layers[1].mlp.gate_up_proj
    weights = [part.dequantised_weight().to(part.dtype) for part in layer.pyquant.parts]
    layer.weight = torch.nn.Parameter(torch.cat(weights), requires_grad=False)
    layer.quant_method = UnquantizedLinearMethod()
    layer.quant_method.process_weights_after_loading(layer)


def main(name: str, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    ranks = case.get("tensor_parallel_size", 1)
    if ranks == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the layers are looked at
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))  # a core for each
    model = model_of(case)
    if isinstance(case["scheme"], dict):  # vLLM knows experts by the names that transformers gives them in files
        switch = importlib.import_module("pyquant.integrations.transformers")
        switch.enable()
        model.save_pretrained(folder / "model")
        switch.disable()
    else:
        pyquant.save_pretrained(model, folder / "model")
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        ended = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(prompt, max_new_tokens=NEW, **ended)[0, len(PROMPT) :].tolist()
        logits = model(torch.tensor([PROMPT + expected])).logits[0, len(PROMPT) - 1 : -1]
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder / "model"),
        quantization=case["method"],
        dtype=case.get("dtype", "float32"),
        enforce_eager=case.get("enforce_eager", True),
        tensor_parallel_size=ranks,
        enable_expert_parallel=case.get("enable_expert_parallel", False),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        worker_extension_cls="pyquant.integrations.vllm.WorkerExtension" if ranks > 1 else "",
    )
    options = SamplingParams(max_tokens=NEW, temperature=0, logprobs=1, detokenize=False, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], options, use_tqdm=False)
    (output,) = answer.outputs
    tokens = list(output.token_ids)
    theirs = torch.tensor([step[token].logprob for step, token in zip(output.logprobs, tokens)])
    ours = logits.float().log_softmax(-1)[range(NEW), tokens]
    found = {"tokens": tokens == expected, "difference": float((theirs - ours).abs().max())}
    if ranks > 1:
        found["reports"] = llm.collective_rpc("pyquant_report")
    else:
        ((equal, all_layers),) = llm.apply_model(lambda one: equal_bits(model, one, model.dtype))
        found |= {"equal": equal, "layers": all_layers, "report": report_of(llm), "ran": counted(llm)}
        if case.get("enforce_eager", True) and case["method"] == "pyquant" and not isinstance(case["scheme"], dict):
            llm.apply_model(put_into_floats)
            found["planted"] = {"report": report_of(llm), "ran": counted(llm)}
    return found


def report_of(llm: Any) -> list[dict[str, Any]]:
    from pyquant.integrations.vllm import serving_report

    (records,) = llm.apply_model(serving_report)
    return [dataclasses.asdict(record) for record in records]


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
