"""Quantisation-aware training: fake quantisation that trains fast, learned ranges and bits, recipes, monitoring."""
