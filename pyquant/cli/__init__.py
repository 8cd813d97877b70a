"""The command line: `pyquant` and `python -m pyquant`."""
