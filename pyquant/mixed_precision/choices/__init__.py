"""The choices that a model has: formats, groups of layers, and the model that can take any configuration of them."""
