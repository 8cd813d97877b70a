"""A toy model that the command-line tests name as `toy_models:...`; written into a temporary folder."""

SOURCE = """
import torch
from torch import nn

NUMBER = 3

def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(20, 64), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))

def build_images():
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, (2, 1), stride=2))

def example_images():
    return torch.randn(2, 3, 8, 8)

def other_architecture():
    return nn.Sequential(nn.Embedding(20, 64), nn.ReLU())

def wider():
    return nn.Sequential(nn.Embedding(20, 64), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 32))

def longer():
    return nn.Sequential(nn.Embedding(20, 64), nn.Linear(64, 100), nn.ReLU(), nn.Linear(96, 32))

def convolving():
    return nn.Sequential(nn.Embedding(20, 64), nn.Conv2d(64, 96, 1), nn.ReLU(), nn.Linear(96, 32))

def not_a_model():
    return 7

def example_inputs():
    return torch.arange(12).view(2, 6)

def needs(a, b=1):
    return build()

class Nested:
    make = staticmethod(build)
"""
