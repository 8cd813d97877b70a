"""The tensor-parallel plan of a model of transformers, for its quantised layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn

from pyquant.errors import UnsupportedError
from pyquant.nn.experts import QExperts

# How a plan calls what this package does: its class, and whether inputs come, or results go, whole.
_COLWISE = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True, "embedding_colwise": True}
_ROWWISE = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True, "embedding_rowwise": True}
_BANKS = frozenset({"moe_tp_experts"})  # a plan cuts experts inside; here ranks hold whole ones, and give the same sums
_LATENT = "mla_kv_a_proj"  # whole too; its last outputs, which are not normed, go into the heads of each rank
_EXPERT = re.compile(r"(?P<bank>.+)\.(?P<expert>\d+)\.\w+")
_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", _LATENT})  # every rank keeps all of it


def is_cut(model: Any) -> bool:
    """Whether a model that is about to be loaded will be in parts."""
    config = getattr(model.config, "distributed_config", None)
    return (getattr(config, "tp_size", 1) or 1) > 1


def _sums_gradients(model: Any, mesh: Any, layer: nn.Module) -> nn.Module:
    """A layer of which every rank keeps all, and whose last outputs go into shares alone: gradients of these are
    summed, as transformers does for the float layer. Results are as they were."""
    from transformers.distributed.tensor_parallel import MlaKvAProjParallel

    style, asked = MlaKvAProjParallel(), SimpleNamespace(config=model.config.get_text_config())
    layer.register_forward_hook(lambda module, args, y: style.transform_output_post_forward(asked, y, mesh))
    return layer


def mesh_of(model: Any) -> Any:
    """The mesh over which a model is being loaded in parts by a tensor-parallel plan; None: it is not.

    Raises UnsupportedError for other ways to distribute a model, with which no layer of it can be quantised.
    """
    manager = getattr(model, "_mesh_manager", None)
    if manager is None:
        return None
    config = model.config.distributed_config
    for name in ("fsdp_size", "dp_replicate_size", "pp_size", "ep_size"):
        size = getattr(config, name, 1) or 1
        if size > 1:
            raise UnsupportedError(
                f"DistributedConfig with {name} = {size} for a quantised model; allowed: tp_size alone. For FSDP2 load "
                "the model on every rank, then codes_to_parameters_ and fully_shard (docs/distributed.md)"
            )
    return manager.get_mesh("tp") if config.tp_size > 1 else None


def styles_of(model: Any, names: list[str] | None = None) -> dict[str, Any]:
    """{name of a module: PyquantColwise, PyquantRowwise or PyquantExpertParallel}, as the plan of the model has them.

    names  of the modules that are, or will be, quantised; None: all that the plan names.
    Raises UnsupportedError naming the layer for a style of the plan that parts codes cannot follow.
    """
    from torch.distributed.tensor import Replicate

    from pyquant.integrations.distributed import PyquantColwise, PyquantExpertParallel, PyquantRowwise

    found: dict[str, Any] = {}
    for name in names if names is not None else [n for n, _ in model.named_modules()]:
        style = _style_of(model, name)
        if style is None or style in _WHOLE:
            continue
        if style in _COLWISE:
            found[name] = PyquantColwise(output_layouts=Replicate() if _COLWISE[style] else None)
        elif style in _ROWWISE:
            found[name] = PyquantRowwise(input_layouts=Replicate() if _ROWWISE[style] else None)
        elif style in _BANKS:
            found[name] = PyquantExpertParallel()
        elif names is not None:
            allowed = ", ".join((*_COLWISE, *_ROWWISE, *sorted(_BANKS | _WHOLE)))
            raise UnsupportedError(
                f"layer '{name}': style '{style}' of the plan, and it is quantised; allowed: {allowed}"
            )
    return found


def _style_of(model: Any, name: str) -> str | None:
    """What the plan of the model says about a module."""
    from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

    plan: dict[str, str] = model.tp_plan or {}
    return plan.get(replace_layer_number_by_wildcard(name))


def cutter(model: Any) -> Callable[[str, nn.Module], nn.Module]:
    """(name, whole quantised layer or bank) -> this rank's share of it, where the model is loaded in parts."""
    mesh = mesh_of(model)

    def cut(name: str, layer: nn.Module) -> nn.Module:
        if _style_of(model, name) == _LATENT:
            return _sums_gradients(model, mesh, layer)
        style = styles_of(model, [name]).get(name)
        if style is None:
            return layer
        style.src_data_rank = None  # every rank reads the same file
        layer.__dict__.pop("forward", None)  # transformers' exchange around a bank, whose share has its own
        try:
            style._apply(layer, mesh)
        except UnsupportedError as error:
            raise UnsupportedError(f"layer '{name}': {error}") from None
        return layer

    return cut if mesh is not None else (lambda name, layer: layer)


def elsewhere(model: Any) -> Callable[[str, nn.Module], bool]:
    """(name of a layer in a bank of experts, the bank) -> whether another process will hold it."""
    from pyquant.integrations.distributed.experts import owner

    mesh = mesh_of(model)

    def is_elsewhere(name: str, form: nn.Module) -> bool:
        found = _EXPERT.fullmatch(name)
        if mesh is None or not isinstance(form, QExperts) or found is None or not styles_of(model, [found["bank"]]):
            return False
        return owner(int(found["expert"]), form.num_experts, mesh.size()) != mesh.get_local_rank()

    return is_elsewhere


def quantise_cut(model: Any, config: Any, options: dict[str, Any]) -> None:
    """Quantise a model whose float weights transformers has loaded in parts."""
    from pyquant.integrations.distributed import quantize_sharded_

    given = {name: value for name, value in options.items() if name != "check_speed"}
    quantize_sharded_(model, config, styles=styles_of(model), **given)
