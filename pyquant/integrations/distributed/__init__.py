"""pyquant on many devices: tensor parallel layers, expert parallel banks, FSDP2 that shards codes, models that are
sharded already.

Nothing here is imported by `import pyquant`. docs/distributed.md is the guide.
"""

from __future__ import annotations

from pyquant.integrations.distributed.codes import codes_to_parameters_
from pyquant.integrations.distributed.from_shards import quantize_from_shards_
from pyquant.integrations.distributed.gather import gather_quantized_
from pyquant.integrations.distributed.quantize import quantize_sharded_
from pyquant.integrations.distributed.styles import PyquantColwise, PyquantExpertParallel, PyquantRowwise

__all__ = [
    "PyquantColwise",
    "PyquantExpertParallel",
    "PyquantRowwise",
    "codes_to_parameters_",
    "gather_quantized_",
    "quantize_from_shards_",
    "quantize_sharded_",
]
