"""Checkpoints on disk: tensors, manifests and schemes; knows no modules and reaches no kernels."""

from pyquant.io.checkpoint import Checkpoint, load_checkpoint, read_manifest, save_checkpoint
from pyquant.io.record import LayerRecord, check_layer

__all__ = ["Checkpoint", "LayerRecord", "check_layer", "load_checkpoint", "read_manifest", "save_checkpoint"]
