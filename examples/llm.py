"""A language model of transformers in integers: tokens a second, memory and perplexity beside its float form.

python examples/llm.py MODEL_DIR [--scheme W8A8Dynamic] [--device cuda]    any local causal model; no download
python examples/llm.py --quick                                             a tiny Llama with random weights

A directory whose config.json has a quantization_config (compressed-tensors, GPTQ, AWQ) is read by load_quantized_, each
weight to the bit; any other one is loaded in bfloat16 and quantised here. merge_ makes q, k and v one product, gate and
up another; fuse_ moves what is between those and the last layer of a block into that one's quantiser.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import pyquant


def tiny(folder: Path) -> Path:
    """A Llama with random weights and no tokenizer, saved as any model is."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder: Path, scheme: str) -> tuple[nn.Module | None, nn.Module]:
    """The float model (None where the directory holds codes) and the quantised one, merged and fused."""
    if "quantization_config" not in json.loads((folder / "config.json").read_text()):
        floats = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()
        quantised = pyquant.quantize_(copy.deepcopy(floats), scheme, check_speed=False)
    else:
        floats, config = None, AutoConfig.from_pretrained(folder, local_files_only=True)
        del config.quantization_config
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        is_own = (folder / "manifest.json").exists()  # written by save_pretrained
        quantised = pyquant.load_pretrained(folder, lambda: empty) if is_own else pyquant.load_quantized_(empty, folder)
        quantised.eval()
    records = pyquant.merge_report(quantised)
    print(f"merged                    {sum(r.state == 'mergeable' for r in records)} groups of layers")
    for reason in dict.fromkeys(r.reason for r in records if r.reason):
        print(f"  apart: {reason}")
    return floats, pyquant.fuse_(pyquant.merge_(quantised) if records else quantised)


def tokens_of(folder: Path, text: str, config: object) -> Tensor:
    """The text as tokens [1, T]; its bytes where the directory has no tokenizer."""
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)(text, return_tensors="pt").input_ids
    return torch.tensor([list(text.encode())]) % config.vocab_size


def megabytes(model: nn.Module) -> float:
    """What the parameters and buffers are saved as; tied ones count once."""
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in model.state_dict().values() if t.numel()}
    return sum(tensors.values()) / 1e6


@torch.no_grad()
def perplexity(model: nn.Module, ids: Tensor, window: int) -> float:
    """exp of the mean loss of every token but the first of a window."""
    parts = [part for part in ids.split(window, 1) if part.shape[1] > 1]
    losses = [model(part, labels=part).loss.double() * (part.shape[1] - 1) for part in parts]
    return float((sum(losses) / sum(part.shape[1] - 1 for part in parts)).exp())


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, count: int) -> tuple[Tensor, float, float]:
    """Greedy tokens with a KV cache, and tokens a second of the prompt and of the tokens after it."""

    def now() -> float:
        if prompt.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    model(prompt[:, :2])  # what is made at the first call is not timed
    start = now()
    out = model(prompt, use_cache=True)
    tokens, first = [out.logits[:, -1:].argmax(-1)], now()
    for _ in range(count - 1):
        out = model(tokens[-1], past_key_values=out.past_key_values, use_cache=True)
        tokens.append(out.logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1), prompt.shape[1] / (first - start), (count - 1) / (now() - first)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL_DIR", help="a local directory of transformers")
    parser.add_argument("--scheme", default="W8A8Dynamic", help="for models that are not quantised yet")
    parser.add_argument("--text", type=Path, help="a text file (default: this script's)")
    parser.add_argument("--tokens", type=int, default=64, help="to generate, at least 2")
    parser.add_argument("--window", type=int, default=512, help="tokens that perplexity sees at once")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="few tokens; without MODEL_DIR a tiny random model")
    args = parser.parse_args(argv)
    if args.tokens < 2 or args.window < 2 or (args.model is None and not args.quick):
        parser.error("MODEL_DIR (or --quick), --tokens and --window of at least 2 are needed")
    with tempfile.TemporaryDirectory() as place:
        folder = args.model or tiny(Path(place) / "tiny")
        floats, quantised = load(folder, args.scheme)
        text = (args.text or Path(__file__)).read_text()[: 1000 if args.quick else None]
        ids = tokens_of(folder, text, quantised.config).to(args.device)
    count, results = 8 if args.quick else args.tokens, []
    places = getattr(quantised.config, "max_position_embeddings", None) or 2**31  # GPT-2's n_positions goes by it, too
    if count > places - 2:
        parser.error(f"--tokens {count}: the model has {places} positions, two of them for a prompt")
    window, length = min(args.window, places), min(128, places - count)
    if window < args.window:
        print(f"{'window':<25} {window} tokens: the model has no more positions")
    for name, model in (("bfloat16", floats), ("quantised", quantised)):
        if model is not None:
            model.to(args.device)
            tokens, prompt, decode = generate(model, ids[:, :length], count)
            results.append(tokens)
            speed = f"{prompt:.1f} tokens/s of a prompt, {decode:.1f} generated"
            print(f"{name:<25} {speed}; {megabytes(model):.3f} MB; perplexity {perplexity(model, ids, window):.3f}")
    if floats is not None:
        print(f"same greedy tokens        {int((results[0] == results[1]).sum())} of {count}")
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        pyquant.save_pretrained(quantised, place)
        again = pyquant.load_pretrained(place, lambda: AutoModelForCausalLM.from_config(quantised.config)).eval()
        again = again.to(args.device)
        same = torch.equal(again(ids[:, :64]).logits, quantised(ids[:, :64]).logits)
    print(f"saved, reloaded           bits equal: {same}")


if __name__ == "__main__":
    main()
