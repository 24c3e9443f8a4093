"""`python -m jlora` is the `jlora` command."""

from jlora.cli import main

raise SystemExit(main())
