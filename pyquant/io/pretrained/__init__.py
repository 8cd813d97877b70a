"""save_pretrained and load_pretrained: a whole model to a checkpoint directory and back, with equal bits."""

from pyquant.io.pretrained.from_floats import quantize_checkpoint_
from pyquant.io.pretrained.load import load_pretrained
from pyquant.io.pretrained.place import layer_of
from pyquant.io.pretrained.quantized import load_quantized_
from pyquant.io.pretrained.save import save_pretrained

__all__ = ["layer_of", "load_pretrained", "load_quantized_", "quantize_checkpoint_", "save_pretrained"]
