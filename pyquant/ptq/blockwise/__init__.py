"""A model block by block: which modules are its blocks, their inputs, one at a time on a device, and going on later."""
