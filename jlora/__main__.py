"""`python -m jlora` is the `jlora` command."""

import sys


def main() -> int:
    """Runs `jlora COMMAND ...`; returns the exit code."""
    try:
        from jlora import cli  # here, because Ctrl-C may come while it is imported

        return cli.main()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
