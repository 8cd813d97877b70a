"""The calibration methods, one file each: a function (statistics, scheme) -> Range under @calibrator("name")."""

from pyquant.core.registry import import_modules

import_modules(__name__)
