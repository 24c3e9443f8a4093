"""`python -m jlora.demo` runs the demo."""

from jlora.demo.run import main

raise SystemExit(main())
