"""The search algorithms: one file each, a function (Search) -> None under @search_algorithm("name")."""

from pyquant.core.registry import import_modules

import_modules(__name__)
