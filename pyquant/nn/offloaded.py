"""Quantised layers that accelerate offloads: their codes lie in its folder or map, as state_dict names them, and are
packed for the device that computes when the layer is called."""

from __future__ import annotations

from typing import Any

import torch

from pyquant.core.remembered import derived
from pyquant.errors import UnsupportedError


def offload_whole(hook: Any, layer: Any) -> None:
    """Let a hook of accelerate that offloads (AlignDevicesHook) load and drop a quantised layer as a whole, in place.

    Raises UnsupportedError for a layer that does not hold its codes alone.
    """
    if "storage" not in layer._buffers:
        raise UnsupportedError(
            "accelerate would offload a layer whose codes merge_ joined with those of others, or codes_to_parameters_ "
            "made a parameter: offload the model without them"
        )
    kind = type(hook)
    if not issubclass(kind, _Whole):
        hook.__class__ = _whole(kind)


@derived
def _whole(kind: type) -> type[_Whole]:
    # compilers do not follow them; here, as torch.compiler.disable imports the compiler
    quiet = {name: torch.compiler.disable(getattr(_Whole, name)) for name in ("pre_forward", "post_forward")}
    return type(kind.__name__, (_Whole, kind), {"__module__": __name__, **quiet})


def refuse_offloaded(name: str, layer: Any) -> None:
    """Raise UnsupportedError for a layer whose codes accelerate has put away, named by what is to be done."""
    hook = getattr(layer, "_hf_hook", None)
    if any(isinstance(one, _Whole) for one in getattr(hook, "hooks", (hook,))) and layer.storage.is_meta:
        raise UnsupportedError(
            f"layer '{name}' is offloaded by accelerate, which holds its codes: call "
            "accelerate.hooks.remove_hook_from_submodules(model) first, which loads them; or save before the dispatch"
        )


class _Whole:
    """Before a hook of accelerate, which without its `offload` moves the inputs of a call and nothing else."""

    offload: bool
    weights_map: Any
    execution_device: Any

    def init_hook(self, module: Any) -> Any:
        state = module._state()
        self.names, self.home = tuple(state), module.storage.device
        if self.weights_map is None:
            self.weights_map = {name: tensor.cpu() for name, tensor in state.items()}
        if not module.storage.is_meta:
            self._check(state)
            module.to("meta")
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self._load(module, self.home if self.execution_device is None else self.execution_device)
        return self._beside("pre_forward", module, *args, **kwargs)

    def post_forward(self, module: Any, output: Any) -> Any:
        module.to("meta")
        return self._beside("post_forward", module, output)

    def detach_hook(self, module: Any) -> Any:
        if module.storage.is_meta and self.home.type != "meta":
            self._load(module, self.home)
        return module

    def _load(self, module: Any, device: Any) -> None:
        module._fill({name: self.weights_map[name].to(device) for name in self.names})

    def _beside(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the hook does with inputs and outputs."""
        self.offload = False
        try:
            return getattr(super(), method)(*args, **kwargs)
        finally:
            self.offload = True

    def _check(self, state: dict[str, torch.Tensor]) -> None:
        """Raise UnsupportedError where accelerate would load something else than the layer holds: it takes a folder
        as it is that has an index already."""
        for name, tensor in state.items():
            kept = self.weights_map.get(name)
            if kept is None or kept.dtype != tensor.dtype or not torch.equal(kept.to(tensor.device), tensor):
                got = "nothing" if kept is None else f"{str(kept.dtype).removeprefix('torch.')} {list(kept.shape)}"
                raise UnsupportedError(
                    f"accelerate would load a quantised layer's '{name}' from where other numbers are ({got}): give an "
                    "empty offload_dir, and no offload_index of files in floating point"
                )
