"""`python -m jlora.doctor` is `jlora doctor`."""

import sys

from jlora.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
