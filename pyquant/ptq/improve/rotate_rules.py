"""What rotate_ knows: who writes and reads the residual stream of a model, what lies around attention, which
inputs nothing but a transform at run time can turn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.ptq.improve.smooth_families import LLAMA


@dataclass(frozen=True)
class RotatedHeads:
    """The Linear that makes attention's values and the one that reads what attention mixes of them, head by head.

    values  name of the first: its rows [N], or those in `rows`, are heads of `size` channels each.
    output  name of the second: its columns are heads of `size` channels each.
    size    channels of one head, at least 1.
    rows    (first, end) of the values among the rows of a Linear that makes queries and keys too; None: all.
    Raises ArgumentError for anything else.

    Example:
        >>> RotatedHeads("blocks.*.qkv", "blocks.*.out", size=16, rows=(128, 192)).size
        16
    """

    values: str
    output: str
    size: int
    rows: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for argument in ("values", "output"):
            _name(argument, getattr(self, argument))
        arguments.whole("size", self.size, 1)
        if self.rows is not None:
            if not isinstance(self.rows, (tuple, list)) or len(self.rows) != 2:
                raise ArgumentError("rows", arguments.shown(self.rows), "(first, end), or None")
            first = arguments.whole("rows", self.rows[0], 0)
            object.__setattr__(self, "rows", (first, arguments.whole("rows", self.rows[1], first + 1)))


@dataclass(frozen=True)
class RotationSpec:
    """Where rotate_ may turn a model: full names, in which '*' stands for one part ('blocks.*.norm1').

    writers  everything that is added to the residual stream: names of Linears, convolutions and nn.Embeddings, and of
             parameters whose last dimension are the channels ('cls_token').
    readers  {norm that reads the stream: the Linears that read its result, which nothing else does}. A '*' in the name
             of a Linear is what the '*' of the norm stands for, in their order.
    heads    RotatedHeads; a '*' in the name of `output` is that of `values`.
    online   Linears whose inputs are turned at run time, as no weight before them could take the matrix: each becomes
             a HadamardLinear.
    Together they must name all that touches the stream: rotate_ compares the model's outputs and undoes what was wrong.
    Raises ArgumentError for anything but names and such pairs.

    Example:
        >>> RotationSpec(writers=["embed", "blocks.*.out"], readers={"blocks.*.norm": ["blocks.*.fc"]}).writers
        ('embed', 'blocks.*.out')
    """

    writers: Sequence[str] = ()
    readers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    heads: Sequence[RotatedHeads] = ()
    online: Sequence[str] = ()

    def __post_init__(self) -> None:
        for argument in ("writers", "online"):
            object.__setattr__(self, argument, _names(argument, getattr(self, argument)))
        readers = arguments.mapping("readers", self.readers, "{norm: [Linears]}")
        object.__setattr__(self, "readers", {_name("readers", n): _names("readers", r) for n, r in readers.items()})
        for norm, linears in self.readers.items():
            if not linears:
                raise ArgumentError("readers", f"no Linear behind '{norm}'", "at least one")
        heads = tuple(arguments.iterable("heads", self.heads, "RotatedHeads"))
        for pair in heads:
            if not isinstance(pair, RotatedHeads):
                raise ArgumentError("heads", arguments.shown(pair), "RotatedHeads")
        object.__setattr__(self, "heads", heads)
        if bool(self.writers) != bool(self.readers):
            got = f"{len(self.writers)} writers and {len(self.readers)} norms with readers"
            raise ArgumentError("spec", got, "both or neither: who writes the stream, and who reads it")


_BY_CLASS: dict[type[nn.Module], RotationSpec] = {}


def register_rotation(model_class: type[nn.Module], spec: RotationSpec) -> type[nn.Module]:
    """Tell rotate_ where a class of models may be turned, so that `rotate_(model, batch)` and improve=['rotate'] do it.

    model_class  subclass of nn.Module; instances of exactly this class, and parts of a model that are such, are meant.
    spec         as rotate_ takes it, with names below the class; its `online` are turned where online=True is given.
    ->           model_class. Registering the same again changes nothing.
    Raises ArgumentError for what is no class of modules or no spec, and for a class that has another spec.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.norm, self.head = nn.Embedding(4, 8), nn.RMSNorm(8), nn.Linear(8, 4)
        ...     def forward(self, ids):
        ...         return self.head(self.norm(self.embed(ids)))
        >>> _ = register_rotation(Net, RotationSpec(writers=["embed"], readers={"norm": ["head"]}))
    """
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        raise ArgumentError("model_class", repr(model_class)[:120], "a subclass of torch.nn.Module")
    if not isinstance(spec, RotationSpec):
        raise ArgumentError("spec", arguments.shown(spec), "a RotationSpec")
    if _BY_CLASS.setdefault(model_class, spec) != spec:
        raise ArgumentError("model_class", f"{model_class.__name__}, registered with another spec", "one spec a class")
    return model_class


def specs_of(model: nn.Module, online: bool) -> Iterator[tuple[str, nn.Module, RotationSpec]]:
    """(prefix of its names, module, spec) of every part of a model whose class is registered or known by the rules."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind in _BY_CLASS:
            spec = _BY_CLASS[kind]
            yield f"{name}." if name else "", module, spec if online else replace(spec, online=())
            continue
        is_theirs = kind.__module__.startswith("transformers.models.") and "forward" not in module.__dict__
        if is_theirs and kind.__name__ in _LLAMA_CLASSES:
            yield f"{name}." if name else "", module, _llama(module, online)


def matching(names: Iterable[str], pattern: str) -> list[tuple[str, tuple[str, ...]]]:
    """(name, what each '*' of the pattern stands for) of the names that a pattern means."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))
    return [(name, found.groups()) for name in names if (found := expression.fullmatch(name))]


def filled(pattern: str, parts: Sequence[str]) -> str:
    """The pattern with its '*' replaced, in order."""
    if pattern.count("*") > len(parts):
        raise ArgumentError("spec", repr(pattern), f"at most {len(parts)} '*', as the name that it follows from")
    for part in parts:
        pattern = pattern.replace("*", part, 1)
    return pattern


# Classes of transformers 5.23 by name; tests/ptq/test_rotate.py holds one small model of each family to its function.
_FAMILIES: Final = ("Llama", "Mistral", "Qwen2", "Qwen3")
_LLAMA_CLASSES: Final = {f"{f}For{task}" for f in _FAMILIES for task in ("CausalLM", "SequenceClassification")}


def _llama(model: Any, online: bool) -> RotationSpec:
    layer = "model.layers.*"
    pairs = {f"{layer}.{producer}": [f"{layer}.{c}" for c in consumers] for producer, consumers in LLAMA}
    readers = {name: consumers for name, consumers in pairs.items() if name.endswith("norm")}
    head = "lm_head" if hasattr(model, "lm_head") else "score"
    values = f"{layer}.self_attn.v_proj"
    return RotationSpec(
        ["model.embed_tokens", f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj"],
        readers | {"model.norm": [head]},
        [RotatedHeads(values, pairs[values][0], model.model.layers[0].self_attn.head_dim)],
        [f"{layer}.mlp.down_proj"] if online else [],
    )


def _name(argument: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ArgumentError(argument, arguments.shown(name), "the name of a module or parameter")
    return name


def _names(argument: str, names: object) -> tuple[str, ...]:
    return tuple(_name(argument, name) for name in arguments.iterable(argument, names, "names"))
