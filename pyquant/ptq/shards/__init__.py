"""Models that lie in files, quantised block by block into other files; memory holds one block."""

from pyquant.ptq.shards.files import quantize_files

__all__ = ["quantize_files"]
