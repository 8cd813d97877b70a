"""Which layer in which precision, from a model and its data to a recipe: choices, loss, latency, solve."""
