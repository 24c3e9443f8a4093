"""`python -m jlora.serve` is `jlora serve`."""

from jlora.serve.launcher import main

raise SystemExit(main())
