"""GGUF files of llama.cpp: blocks of Q8_0, Q4_0 and Q6_K as codes, everything else as real numbers.

Q8_0  32 numbers: d, 32 codes          weight = d * q
Q4_0  32 numbers: d, 16 bytes          weight = d * (q - 8), the sign of d that of the largest number
Q6_K  256 numbers: 16 scales and d     weight = (d * scale) * (q - 32)
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from pyquant.core.names import listed
from pyquant.errors import CheckpointError, QuantizationWarning
from pyquant.io.foreign.gguf_header import TYPES, Block, read_header
from pyquant.io.foreign.record import ForeignLayer, Options, foreign_layer
from pyquant.io.foreign.tensors import BytesOf, as_tensor

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WIDTHS: Final = {name: width for name, _, width in TYPES.values()}
_SORTED: Final = "llama"  # of this architecture the rows of q and k are sorted for llama.cpp's rotation
_ARCHITECTURES: Final = (_SORTED, "qwen2", "qwen3", "qwen2moe", "qwen3moe")
_OUTSIDE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_BANKS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MAX_EXPERTS: Final = 2**16
_SORTED_THERE: Final = "rows of q and k in the order of its rotation"
_NORMS_THERE: Final = "weights of norms with 1 added"
_QKV_THERE: Final = "rows of q, k and v in another order"
# Architectures of which llama.cpp's convert_hf_to_gguf.py stores something otherwise than transformers, and what.
_CHANGED: Final = {
    **dict.fromkeys(("arcee", "baichuan", "deci", "granite", "granitemoe", "internlm2"), _SORTED_THERE),
    **dict.fromkeys(("minicpm", "olmo", "smollm3", "xverse"), _SORTED_THERE),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "nemotron", "qwen3next"), _NORMS_THERE),
    **dict.fromkeys(("bloom", "falcon", "gptneox"), _QKV_THERE),
}
_COMPUTED: Final = ("rope_freqs.weight",)  # models compute them
_NAME: Final = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_HEADS: Final = {"attn_q": "head_count", "attn_k": "head_count_kv"}
Numbers = tuple[torch.Tensor, torch.Tensor]


class Source:
    """The tensors of a GGUF file: under the names of transformers for _ARCHITECTURES (Mixtral is a llama there), else
    under their own. A tensor [E, N, K] of experts is E matrices."""

    def __init__(self, path: Path) -> None:
        self.directory = path
        self._file = BytesOf(path)
        header = read_header(self._file)
        self.words, self.config, self.method = header.words, dict[str, Any](), dict[str, Any]()
        self.architecture = header.words.get("general.architecture")
        if (parts := header.words.get("split.count", 0)) not in (0, 1):
            got = f"{path}: one of {str(parts)[:40]} parts"
            raise CheckpointError(f"{got}; allowed: a whole model (llama-gguf-split --merge joins them)")
        self._own: dict[str, str] = {}
        self._blocks: dict[str, Block] = {}
        for name, block in header.tensors.items():
            for own, part in () if name in _COMPUTED else self._named(name, block):
                if own in self._own:
                    raise CheckpointError(f"{path}: two tensors of one name")
                self._own[own], self._blocks[own] = name, part

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def block(self, name: str) -> Block:
        """What the file says of a tensor."""
        return self._blocks[name]

    def read(self, name: str) -> torch.Tensor:
        """A tensor as real numbers; blocks of codes as float32."""
        block = self.block(name)
        if block.kind in _FLOATS:
            found = as_tensor(self._file.read(block.start, block.size), _FLOATS[block.kind], block.shape)
        else:
            codes, scale = self.numbers(name)
            width = codes.shape[1] // scale.shape[1] if scale.shape[1] else 1
            found = (codes.to(torch.float32) * scale.repeat_interleave(width, 1)).reshape(block.shape)
        rows = self._rows(name, block.shape)
        return found if rows is None else found[rows]

    def numbers(self, name: str) -> Numbers:
        """Codes int8 [N, K] and scales float32 [N, groups] of a matrix of blocks, its rows as the file has them."""
        block = self.block(name)
        width = _WIDTHS[block.kind]
        data = as_tensor(self._file.read(block.start, block.size), torch.uint8, (block.size // width, width))
        rows, columns = math.prod(block.shape[:-1]), block.shape[-1]
        codes, scale = UNPACK[block.kind](data)
        return codes.reshape(rows, columns), scale.reshape(rows, columns // (codes.shape[1] // scale.shape[1]))

    def layer(self, name: str, options: Options) -> ForeignLayer:
        """A matrix of blocks as a layer; `name` without '.weight'."""
        key = f"{name}.weight"
        codes, scale = self.numbers(key)
        rows = self._rows(key, codes.shape)
        if rows is not None:
            codes, scale = codes[rows], scale[rows]
        bits = 4 if self.block(key).kind == "Q4_0" else 8
        bias = self.read(f"{name}.bias") if f"{name}.bias" in self else None
        return foreign_layer(name, bits, codes, scale, None, options=options, bias=bias)

    def _named(self, name: str, block: Block) -> Iterator[tuple[str, Block]]:
        """What a tensor of the file is in the model: one tensor, or a matrix of each expert."""
        inside = _NAME.fullmatch(name) if self.architecture in _ARCHITECTURES else None
        if inside and inside[2] in _BANKS and len(block.shape) == 3:
            count, part = block.shape[0], _BANKS[inside[2]]
            if count > _MAX_EXPERTS:
                raise CheckpointError(f"{self.directory}: tensor '{name}': {count} experts; allowed: {_MAX_EXPERTS}")
            for e in range(count):
                size = block.size // count
                own = Block(block.kind, block.shape[1:], block.start + e * size, size)
                yield f"model.layers.{inside[1]}.mlp.experts.{e}.{part}.{inside[3]}", own
        elif inside and inside[2] in _INSIDE:
            row = (1, *block.shape) if inside[2] == "ffn_gate_inp_shexp" and len(block.shape) == 1 else block.shape
            yield f"model.layers.{inside[1]}.{_INSIDE[inside[2]]}.{inside[3]}", replace(block, shape=row)
        else:
            yield _OUTSIDE.get(name, name) if self.architecture in _ARCHITECTURES else name, block

    def check_rules(self) -> None:
        """Raise CheckpointError where llama.cpp's converter changes numbers of the architecture otherwise than _rows
        knows; warn of one that nobody has looked at: names alone do not take such changes back."""
        if self.architecture in _ARCHITECTURES or not isinstance(self.architecture, str):
            return
        if self.architecture in _CHANGED:
            what = _CHANGED[self.architecture]
            got = f"{self.directory}: architecture '{self.architecture}', of which llama.cpp stores {what}"
            raise CheckpointError(f"{got}; allowed: {listed(list(_ARCHITECTURES))}, and others whose tensors it leaves")
        warnings.warn(
            f"{self.directory}: architecture '{self.architecture[:40]}': tensors are taken as the file has them; "
            "llama.cpp's converter reorders rows or changes norms of some models: compare results with the float model",
            QuantizationWarning,
            stacklevel=2,
        )

    def _rows(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Where each row of the model lies in the file; None: in its place."""
        own = _NAME.fullmatch(self._own[name])
        if self.architecture != _SORTED or own is None or own[2] not in _HEADS:
            return None
        heads = self.words.get(
            f"{_SORTED}.attention.{_HEADS[own[2]]}", self.words.get(f"{_SORTED}.attention.head_count")
        )
        if isinstance(heads, tuple) and int(own[1]) < len(heads):  # a number for each layer
            heads = heads[int(own[1])]
        if not isinstance(heads, int) or heads < 1 or shape[0] % (2 * heads):
            got = f"{shape[0]} rows for {str(heads)[:40]} heads"
            raise CheckpointError(f"{self.directory}: tensor '{name}': {got}; allowed: an even number a head")
        return torch.arange(shape[0], device="cpu").reshape(heads, -1, 2).transpose(1, 2).reshape(-1)


class Reader:
    """The matrices of a GGUF file that are held as blocks of codes, without the embedding."""

    def __init__(self, source: Source, options: Options) -> None:
        self.source, self.options = source, options

    def layers(self) -> Mapping[str, frozenset[str]]:
        owned = {}
        for key in self.source:
            block, name = self.source.block(key), key.removesuffix(".weight")
            if block.kind not in _FLOATS and len(block.shape) == 2 and key.endswith(".weight") and not _is_table(key):
                owned[name] = frozenset({key, f"{name}.bias"} & set(self.source))
        return owned

    def dropped(self) -> frozenset[str]:
        return frozenset()

    def read(self, name: str) -> ForeignLayer:
        return self.source.layer(name, self.options)


def _is_table(key: str) -> bool:
    return key in ("token_embd.weight", _OUTSIDE["token_embd.weight"])


def _q8_0(data: torch.Tensor) -> Numbers:
    return data[:, 2:].contiguous().view(torch.int8), _half(data[:, :2])


def _q4_0(data: torch.Tensor) -> Numbers:
    packed = data[:, 2:]
    codes = torch.cat([packed & 15, packed >> 4], dim=1).to(torch.int8) - 8
    return codes, _half(data[:, :2])


def _q6_k(data: torch.Tensor) -> Numbers:
    low, high, scales = data[:, :128], data[:, 128:192], data[:, 192:208].contiguous().view(torch.int8)
    low = torch.stack([low.reshape(-1, 2, 64) & 15, low.reshape(-1, 2, 64) >> 4], 2).reshape(-1, 8, 32)
    high = torch.stack([high.reshape(-1, 2, 32) >> shift & 3 for shift in (0, 2, 4, 6)], 2).reshape(-1, 8, 32)
    codes = (low | high << 4).to(torch.int8) - 32
    return codes.reshape(-1, 256), _half(data[:, 208:]) * scales.to(torch.float32)


def _half(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float16).to(torch.float32)


UNPACK: Final[dict[str, Callable[[torch.Tensor], Numbers]]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q6_K": _q6_k}
