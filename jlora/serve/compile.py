"""`jlora compile`: every program of a server, compiled into a directory that an image can ship."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jlora import config as configuration
from jlora.errors import JloraError
from jlora.serve import flags

DESCRIPTION = """Compiles every program that `jlora serve` with the same flags runs, into a directory.

Run it on the device that will serve: programs fit one kind of device, one version of jax, and the
sizes of this configuration. A server with --set serve.compile_cache=DIR loads them and compiles
nothing; if something differs, it says what, and compiles."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints one line and returns the exit code."""
    parser = flags.parser("jlora compile", DESCRIPTION)
    parser.add_argument("--out", metavar="DIR", required=True, help="directory of compiled programs")
    args = parser.parse(sys.argv[1:] if argv is None else argv)
    try:
        config = configuration.replace(flags.config_of(args), {"serve.compile_cache": args.out, "engine.warmup": True})
    except JloraError as e:
        parser.error(str(e))

    from jlora.engine import compile_cache  # these import jax: only after the flags are checked
    from jlora.engine.build import build, compile_rest, compiled_for

    built = compile_rest(build(config), progress=sys.stderr.isatty())
    built.engine.close()
    facts = compiled_for(built.info, built.reader.spec, built.reader.layout)
    compile_cache.seal(Path(args.out), facts)
    fixed = f"cache.hbm_blocks={facts['blocks']}"  # chosen from the free memory, which may be another at the next start
    print(f"wrote {args.out}: serve with `--set serve.compile_cache={args.out} {fixed}`")
    return 0
