"""Which layer in which precision, from a model and its data to a recipe: analyse, search and report together."""
