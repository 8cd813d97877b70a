"""What quantisation does to a model: which layer suffers by which format, and what each format costs in time."""

from pyquant.analyse.layerwise import cost_of, sensitivity

__all__ = ["cost_of", "sensitivity"]
