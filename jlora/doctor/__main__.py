"""`python -m jlora.doctor` is `jlora doctor`, and the way to start it where few packages are installed."""

import sys

from jlora.doctor import needs

if __name__ == "__main__":
    if reason := needs.missing():
        sys.exit(f"jlora doctor: {reason}")
    from jlora.doctor.cli import main  # it imports them

    sys.exit(main())
