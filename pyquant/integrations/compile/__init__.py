"""torch.compile and torch.export of quantised models: a pass that fuses, and programs for another device."""

from pyquant.integrations.compile.fuse import FusePass, fuse_exported, fuse_options
from pyquant.integrations.compile.retarget import retarget

__all__ = ["FusePass", "fuse_exported", "fuse_options", "retarget"]
