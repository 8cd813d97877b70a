"""The (K, N) of the linear layers of known models, as they run: projections that share an input are one product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pyquant.errors import ArgumentError

KN = tuple[int, int]


def parse_kn(text: str, argument: str = "--kn", allowed: str = "in_features x out_features, such as 1024x4096") -> KN:
    """'1024x4096' -> (1024, 4096); ArgumentError otherwise."""
    k, _, n = text.lower().partition("x")
    if not (k.isdecimal() and n.isdecimal() and int(k) > 0 and int(n) > 0):
        raise ArgumentError(argument, repr(text), allowed)
    return int(k), int(n)


_SHAPES: Final = {
    "llama-3-8b": "4096x6144 4096x4096 4096x28672 14336x4096",
    "llama-3-70b": "8192x10240 8192x8192 8192x57344 28672x8192",
    "bert-base": "768x768 768x3072 3072x768",
    "bert-large": "1024x1024 1024x4096 4096x1024",
    "vit-b": "768x2304 768x768 768x3072 3072x768",
    "vit-l": "1024x3072 1024x1024 1024x4096 4096x1024",
    # attention and feed-forward projections at the UNet's three widths; the text has 768 features
    "sd-1.5-unet": "320x960 320x320 768x640 320x2560 1280x320 640x1920 640x640 768x1280 640x5120 2560x640 1280x3840 "
    "1280x1280 768x2560 1280x10240 5120x1280",
    "dit-xl-2": "1152x3456 1152x1152 1152x4608 4608x1152 1152x6912",
    # policy and value network of continuous control: 376 observations (Humanoid), 17 actions
    "rl-sac-humanoid": "376x256 256x256 256x34 393x256 256x1",
    # bottom and top of the recommender that MLPerf trains, without its tables of embeddings
    "dlrm": "13x512 512x256 256x128 479x1024 1024x1024 1024x512 512x256 256x1",
    # six layers from 32768 features down to 1024 and back, the mixed-precision search's example
    "mlp-6": "32768x16384 16384x8192 8192x4096 4096x2048 2048x1024 1024x32768",
}
MODELS: Final[Mapping[str, tuple[KN, ...]]] = {
    name: tuple(parse_kn(shape) for shape in shapes.split()) for name, shapes in _SHAPES.items()
}
MS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def shapes_of(models: Iterable[str]) -> list[KN]:
    """The distinct (K, N) of models, in table order.

    Raises ArgumentError for a model that is not in MODELS.
    """
    shapes: dict[KN, None] = {}
    for model in models:
        if model not in MODELS:
            raise ArgumentError("models", repr(model), ", ".join(MODELS))
        shapes |= dict.fromkeys(MODELS[model])
    return list(shapes)
