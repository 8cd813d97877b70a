"""`python -m pyquant`: the same as the `pyquant` command."""

import sys

from pyquant.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
