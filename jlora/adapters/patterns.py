"""Regular expressions of an adapter's configuration: as PEFT reads them, in linear time.

PEFT matches module names with `re`, which takes exponential time for some patterns and holds Python's
lock meanwhile. RE2 takes time in proportion to the pattern and the name. A pattern is accepted if both
engines read it, and read it alike on the names of a Llama's modules, which are plain ASCII.
"""

from __future__ import annotations

import re
from typing import Any

import re2

MAX_CHARS = 1_000  # RE2 reads no \u, so a range of characters that `re` must expand has at most 256
MAX_BYTES = 1 << 18  # of a compiled pattern, which bounds its instructions to 4,000

# What both engines accept, and read differently: \11 (a reference, a character), [[:alpha:]] (characters, a
# class), a{,3} and a{03} (a repetition, characters).
_READ_DIFFERENTLY = re.compile(r"\\[1-9]|\[:|\{,|\{0[0-9]|,0[0-9]")

Pattern = Any  # re2 has no public type: match(text), fullmatch(text), programsize


def compile_pattern(pattern: str) -> Pattern:
    """The compiled pattern. Raises ValueError, which says what it must not have."""
    if len(pattern) > MAX_CHARS:
        raise ValueError(f"{len(pattern)} characters, and at most {MAX_CHARS} are read")
    if not pattern.isascii():
        raise ValueError("a character that no module's name has")
    try:  # first: `re` may take a second for ranges of characters that RE2 refuses at once
        compiled = re2.compile(pattern.encode(), _options())
    except re2.error as e:  # look-around, references, too many instructions
        raise ValueError(e.args[0].decode(errors="replace")) from e
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as e:  # a warning: -W error
        raise ValueError(str(e)) from e
    found = _READ_DIFFERENTLY.search(pattern)
    if found:
        raise ValueError(f"{found[0]} is not supported")
    return compiled


def _options() -> re2.Options:
    options = re2.Options()
    options.max_mem = MAX_BYTES
    options.encoding = re2.Options.Encoding.LATIN1  # one byte a character: `.` is one instruction
    options.log_errors = False
    return options
