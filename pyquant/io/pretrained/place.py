"""Saved layers and tensors in the places of a model: what every reader of a checkpoint does with what it read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core.names import listed
from pyquant.core.patches import Patches
from pyquant.core.presets import W8A16
from pyquant.core.scheme import QScheme
from pyquant.errors import CheckpointError
from pyquant.io import LayerRecord
from pyquant.io.pretrained.save import is_inside
from pyquant.nn import origin
from pyquant.nn.own_embedding import like
from pyquant.nn.patches import unsupported
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.undo import Undo

_KINDS: Final[dict[str, tuple[type[nn.Module], ...]]] = {
    "linear": (nn.Linear, QLinear),
    "embedding": (nn.Embedding, QEmbedding),
    "conv2d": (nn.Conv2d, QConv2d),
}


def module_of(layer: LayerRecord, old: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The saved layer as a module that fits where `old` is."""
    is_embedding = layer.kind == "embedding"
    if not isinstance(old, _KINDS[layer.kind]):
        raise CheckpointError(
            f"layer '{layer.name}' is a saved {layer.kind}; the model has a {type(old).__name__} there"
        )
    saved, has = _geometry(layer), _geometry(old)
    if saved != has:
        raise CheckpointError(f"layer '{layer.name}': saved {saved}, the model has {has}")
    # The other way round is a bias that quantisation gave the layer (bias_correction_, fold_batch_norm_).
    if not is_embedding and layer.bias is None and old.bias is not None:
        raise CheckpointError(f"layer '{layer.name}': the model has a bias, the checkpoint has none")
    new = _embedding(layer, old, dtype) if is_embedding else layer_of(layer, dtype)
    origin.remember(new, old)
    home = next((t.device for t in (*old.parameters(), *old.buffers())), torch.device("cpu"))
    # made on the CPU; what its class computes with and does not save may be on the meta device, for others to fill
    return (new if home.type == "meta" else new.to(home)).train(old.training)


def _geometry(layer: Any) -> str:
    """Sizes of a record or of a module, in words that can be compared."""
    if isinstance(layer, LayerRecord):
        sizes, patches = [layer.out_features, layer.in_features], layer.geometry and Patches(**layer.geometry)
    elif isinstance(layer, (nn.Embedding, QEmbedding)):
        sizes, patches = [layer.num_embeddings, layer.embedding_dim], None
    elif isinstance(layer, nn.Conv2d):
        patches = Patches.of(layer)
        sizes = [layer.out_channels, layer.in_channels // patches.groups * patches.pixels]
        if unsupported(layer) is not None:
            return f"{sizes} with {unsupported(layer)}"
    else:
        sizes, patches = [layer.out_features, layer.in_features], getattr(layer, "patches", None)
    return str(sizes) if patches is None else f"{sizes} {patches}"


def layer_of(layer: LayerRecord, dtype: torch.dtype = torch.float32) -> QLinear | QConv2d:
    """The layer that a record of kind 'linear' or 'conv2d' describes, on the CPU; `dtype` as in QLinear."""
    scheme, scale, zero_point = QScheme.from_dict(layer.scheme), layer.weight_scale, layer.weight_zero_point
    if scheme.weights.granularity == "per_tensor":
        scale = None if scale is None else scale.repeat(layer.out_features)
        zero_point = None if zero_point is None else zero_point.repeat(layer.out_features)
    make: Any = QLinear.from_codes
    if layer.geometry is not None:
        make = partial(QConv2d.from_codes, patches=Patches(**layer.geometry))
    new: QLinear | QConv2d = make(
        layer.codes,
        scale,
        scheme=scheme,
        bias=None if layer.bias is None else layer.bias.to(torch.float32),
        weight_zero_point=zero_point,
        input_scale=layer.input_scale,
        input_zero_point=layer.input_zero_point,
        output_scale=layer.output_scale,
        output_zero_point=layer.output_zero_point,
        activation=layer.activation,
        clamp=layer.clamp,
        dtype=dtype,
    )
    return new


def _embedding(layer: LayerRecord, old: nn.Module, dtype: torch.dtype) -> QEmbedding:
    if layer.weight_scale is None or QScheme.from_dict(layer.scheme) != W8A16():
        raise CheckpointError(f"layer '{layer.name}': embeddings are saved as W8A16, one int8 row with one scale")
    padding_idx = getattr(old, "padding_idx", None)
    new = QEmbedding.from_codes(layer.codes, layer.weight_scale, padding_idx=padding_idx, dtype=dtype)
    return like(old, new) if isinstance(old, nn.Embedding) else new


def check_keys(skeleton: nn.Module, quantised: list[str], tensors: Mapping[str, Tensor]) -> None:
    state = skeleton.state_dict(keep_vars=True)
    expected = {key: value for key, value in state.items() if not is_inside(key, set(quantised))}
    stored = {id(value) for key, value in expected.items() if key in tensors}
    tied = {key for key, value in expected.items() if isinstance(value, nn.Parameter) and id(value) in stored}
    expected = {key: value for key, value in expected.items() if key in tensors or key not in tied}
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        norms = {
            name for name, module in skeleton.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
        }
        folded = "; a BatchNorm folded into a layer? then build the model with fold_batch_norm_, too"
        raise CheckpointError(
            f"checkpoint and model differ: missing in the checkpoint {listed(missing) or 'nothing'}; "
            f"unexpected {listed(unexpected) or 'nothing'}"
            + (folded if any(key.rpartition(".")[0] in norms for key in missing) else "")
        )
    for key, value in expected.items():
        if not isinstance(value, Tensor) or value.shape != tensors[key].shape:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"tensor '{key}': saved {list(tensors[key].shape)}, the model has {shape}")


def assign(skeleton: nn.Module, tensors: Mapping[str, Tensor], undo: list[Undo]) -> None:
    """Every tensor of the checkpoint becomes the parameter or buffer of its name; tied ones stay tied."""
    placed: dict[int, Tensor] = {}
    named = skeleton.named_parameters(remove_duplicate=False)
    others = [(key, value) for key, value in named if key not in tensors]
    for key, saved in tensors.items():
        owner_name, _, name = key.rpartition(".")
        owner = skeleton.get_submodule(owner_name)
        held: dict[str, Any] = owner._buffers
        if name in owner._parameters:
            held = owner.__dict__["_parameters"]
        old = held[name]
        if old is None:
            raise CheckpointError(f"tensor '{key}' is in the checkpoint; the model has none there")
        if id(old) not in placed:
            value = saved.to("cpu" if old.is_meta else old.device)
            placed[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        elif not _are_same(placed[id(old)].detach().cpu(), saved):
            raise CheckpointError(
                f"tensor '{key}' is tied to another in the model; the checkpoint has two different ones"
            )
        undo.append(partial(held.__setitem__, name, old))
        held[name] = placed[id(old)]
    for key, old in others:  # tied to what is stored under another name
        if id(old) in placed:
            owner_name, _, name = key.rpartition(".")
            held = skeleton.get_submodule(owner_name).__dict__["_parameters"]
            undo.append(partial(held.__setitem__, name, old))
            held[name] = placed[id(old)]


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, NaN included."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def refill(skeleton: nn.Module, undo: list[Undo]) -> None:
    """Buffers of a transformers model that are on the meta device after loading, with the numbers it gives them."""
    from pyquant.integrations import transformers

    if any(t.is_meta for t in skeleton.buffers()):
        for module in skeleton.modules():
            if transformers.is_model(module):
                transformers.refill_buffers(module, undo)


def check_no_meta(model: nn.Module) -> None:
    left = sorted(name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta)
    if left:
        raise CheckpointError(
            f"the checkpoint has no numbers for {listed(left)} (buffers that state_dict leaves out), which are on the "
            "meta device; build the model on the CPU"
        )
