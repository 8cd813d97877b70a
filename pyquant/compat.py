"""Names that other projects' code and tutorials use, over pyquant's own: adaptors without logic.

>>> from pyquant.compat import pytorch_quantization as quant_nn
>>> quant_nn.QuantDescriptor(num_bits=8, axis=0).calib_method
'max'
"""

from pyquant.integrations import pytorch_quantization, super_gradients

__all__ = ["pytorch_quantization", "super_gradients"]
