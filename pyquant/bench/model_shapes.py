"""The (K, N) of the linear layers of known models, as they run: projections that share an input are one product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pyquant.errors import ArgumentError

KN = tuple[int, int]

MODELS: Final[Mapping[str, tuple[KN, ...]]] = {
    "llama-3-8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "llama-3-70b": ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)),
    "bert-base": ((768, 768), (768, 3072), (3072, 768)),
    "bert-large": ((1024, 1024), (1024, 4096), (4096, 1024)),
    "vit-b": ((768, 2304), (768, 768), (768, 3072), (3072, 768)),
    "vit-l": ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)),
    # attention and feed-forward projections at the UNet's three widths; the text has 768 features
    "sd-1.5-unet": (
        (320, 960),
        (320, 320),
        (768, 640),
        (320, 2560),
        (1280, 320),
        (640, 1920),
        (640, 640),
        (768, 1280),
        (640, 5120),
        (2560, 640),
        (1280, 3840),
        (1280, 1280),
        (768, 2560),
        (1280, 10240),
        (5120, 1280),
    ),
    "dit-xl-2": ((1152, 3456), (1152, 1152), (1152, 4608), (4608, 1152), (1152, 6912)),
    # policy and value network of continuous control: 376 observations (Humanoid), 17 actions
    "rl-sac-humanoid": ((376, 256), (256, 256), (256, 34), (393, 256), (256, 1)),
    # bottom and top of the recommender that MLPerf trains, without its tables of embeddings
    "dlrm": ((13, 512), (512, 256), (256, 128), (479, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)),
    # six layers from 32768 features down to 1024 and back, the mixed-precision search's example
    "mlp-6": ((32768, 16384), (16384, 8192), (8192, 4096), (4096, 2048), (2048, 1024), (1024, 32768)),
}
MS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def shapes_of(models: Iterable[str]) -> list[KN]:
    """The distinct (K, N) of models, in table order.

    Raises ArgumentError for a model that is not in MODELS.

    Example:
        >>> shapes_of(["bert-base", "vit-b"])
        [(768, 768), (768, 3072), (3072, 768), (768, 2304)]
    """
    shapes: dict[KN, None] = {}
    for model in models:
        if model not in MODELS:
            raise ArgumentError("models", repr(model), ", ".join(MODELS))
        shapes |= dict.fromkeys(MODELS[model])
    return list(shapes)
