"""What the way through transformers costs a quantised model: python -m bench.transformers_path [--threads N].

MiniLM (one sentence of 24 tokens) and a Llama-shaped decoder (eight greedy tokens by generate), batch 1, in
W8A8Dynamic. Each is quantised by quantize_, so that its layers are QLinears and nothing else, and by from_pretrained:
while it loads, and from the checkpoint that it saved. Tokens a second of all three, interleaved in one run, once their
results were compared. Goal: what from_pretrained gives takes at most 5 % longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pyquant
from bench.minilm import model as minilm
from pyquant.integrations import transformers as path
from pyquant.measure.timing import time_interleaved, using_threads

GOAL, SCHEME = 1.05, "W8A8Dynamic"
TOKENS, NEW = 24, 8
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "pad_token_id": 0,
}


def ways(load: Callable[..., Any], folder: Path) -> dict[str, Any]:
    """The three models. load(folder, **options) is from_pretrained of the class."""
    own = pyquant.quantize_(load(folder / "float"), SCHEME, heads=False, check_speed=False)
    loading = load(folder / "float", quantization_config=path.PyquantConfig(SCHEME, heads=False, check_speed=False))
    loading.save_pretrained(folder / "quantised")
    found = {"quantize_": own, "from_pretrained, while loading": loading}
    found["from_pretrained, a checkpoint"] = load(folder / "quantised")
    layers = {
        name: [n for n, m in model.named_modules() if isinstance(m, pyquant.QLinear)] for name, model in found.items()
    }
    assert len(layers["quantize_"]) > 10
    assert all(each == layers["quantize_"] for each in layers.values()), "not the same layers are quantised"
    return {name: model.eval() for name, model in found.items()}


def compare(title: str, models: dict[str, Any], run: Callable[[Any], torch.Tensor], tokens: int, rounds: int) -> bool:
    """Prints a line a way. -> whether the goal is met."""
    first = run(models["quantize_"])
    assert all(torch.equal(run(model), first) for model in models.values()), "results differ"
    times = time_interleaved({name: (lambda m=m: run(m)) for name, m in models.items()}, rounds=rounds)
    is_met = True
    for name in models:
        seconds = times.median_us(name) / 1e6
        ratio = statistics.median(a / b for a, b in zip(times.samples[name], times.samples["quantize_"]))
        is_met = is_met and ratio <= GOAL
        print(f"{title:14} {name:32} {tokens / seconds:8.1f} tokens/s, {ratio:5.3f} of the time of quantize_")
    return is_met


def main(argv: list[str] | None = None) -> int:
    """Prints the table. -> 1 where the goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.transformers_path", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the machine's)")
    parser.add_argument("--rounds", type=int, default=31, help="of the interleaved timing")
    args = parser.parse_args(argv)
    from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    path.enable()
    is_met = True
    with using_threads(args.threads), torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        ids = torch.randint(5, 90, (1, TOKENS), generator=torch.Generator().manual_seed(0), device="cpu")
        bert = minilm.load_float().bert
        bert.save_pretrained(Path(folder, "bert", "float"))
        load = lambda *a, **k: AutoModel.from_pretrained(*a, add_pooling_layer=False, **k)  # noqa: E731
        models = ways(load, Path(folder, "bert"))
        is_met &= compare("MiniLM", models, lambda m: m(input_ids=ids).last_hidden_state, TOKENS, args.rounds)
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(Path(folder, "llama", "float"))
        models = ways(AutoModelForCausalLM.from_pretrained, Path(folder, "llama"))
        greedy = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        is_met &= compare("Llama-shaped", models, lambda m: m.generate(ids[:, :8], **greedy), NEW, args.rounds)
        print(f"batch 1, {SCHEME}, {torch.get_num_threads()} threads; goal: at most {GOAL:.2f}")
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
