"""save_pretrained and load_pretrained: a whole model to a checkpoint directory and back, with equal bits."""

from pyquant.io.pretrained.load import layer_of, load_pretrained
from pyquant.io.pretrained.save import save_pretrained

__all__ = ["layer_of", "load_pretrained", "save_pretrained"]
