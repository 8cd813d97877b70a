"""A whole engine of vLLM on a CPU: python engine.py CASE FOLDER. Prints what it found as one line of JSON.

A small Llama with random weights is quantised, saved by save_pretrained and started by vllm.LLM. Beside it the
quantised model runs in transformers: the same tokens, nearly the same log-probabilities (attention and norms are
vLLM's own), and to the bit the same results of every quantised layer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
    "two ranks": {"scheme": "W8A16", "method": "pyquant", "tensor_parallel_size": 2},
}
PROMPT, NEW = [1, 5, 9, 33, 100, 7, 250], 12


def model_of(case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
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
    )
    model = LlamaForCausalLM(config).to(getattr(torch, case.get("dtype", "float32"))).eval()
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


def equal_bits(model: Any, vllm_model: Any, dtype: torch.dtype) -> tuple[int, int]:
    """(layers of the checkpoint that vLLM runs with the same bits, all of them)."""
    equal, quantised = 0, [n for n, m in model.named_modules() if isinstance(m, (pyquant.QLinear, pyquant.QEmbedding))]
    for names, theirs in layers_of(vllm_model).items():
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


def main(name: str, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    ranks = case.get("tensor_parallel_size", 1)
    if ranks == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the layers are looked at
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))  # a core for each
    model = model_of(case)
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
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
    )
    options = SamplingParams(max_tokens=NEW, temperature=0, logprobs=1, detokenize=False, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], options, use_tqdm=False)
    (output,) = answer.outputs
    tokens = list(output.token_ids)
    theirs = torch.tensor([step[token].logprob for step, token in zip(output.logprobs, tokens)])
    ours = logits.float().log_softmax(-1)[range(NEW), tokens]
    equal, all_layers = (0, 0)
    if ranks == 1:
        ((equal, all_layers),) = llm.apply_model(lambda one: equal_bits(model, one, model.dtype))
    difference = float((theirs - ours).abs().max())
    return {"tokens": tokens == expected, "difference": difference, "equal": equal, "layers": all_layers}


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
