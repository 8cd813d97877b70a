"""Recipes: a model's quantisation as a file. Strict reading, identical writing; what runs it is pyquant.ptq and qat."""

from pyquant.recipe.layer_rule import LayerRule
from pyquant.recipe.recipe import Recipe, is_recipe
from pyquant.recipe.sections import (
    CalibrationParams,
    Provenance,
    QatModification,
    QatParams,
    RecipeNotice,
    SearchParams,
    SelectiveParams,
)

__all__ = [
    "CalibrationParams",
    "LayerRule",
    "Provenance",
    "QatModification",
    "QatParams",
    "Recipe",
    "RecipeNotice",
    "SearchParams",
    "SelectiveParams",
    "is_recipe",
]
