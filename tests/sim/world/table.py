"""The planted bugs as docs/simulated-faults.md lists them: what each does, and a seed of CI that finds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "simulated-faults.md"
BEGIN, END = "<!-- python -m tests.sim.world.planted writes this -->\n", "<!-- as far as here -->\n"
ROW = re.compile(r"^\| `(\w+)` \| .* \| (\d+) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Bug:
    """A planted bug. `mended`: the product once had it; `says`: the failure, as a regular expression."""

    name: str
    world: str
    what: str
    mended: bool
    says: str

    @classmethod
    def of(cls, plant: Callable[..., object], world: str, mended: bool, says: str) -> Bug:
        """Says what its docstring says, or else its name."""
        name, doc = plant.__name__, " ".join((plant.__doc__ or "").split())
        return cls(name, world, doc or f"{name.replace('_', ' ').capitalize()}.", mended, says)


def seeds() -> dict[str, int]:
    """Name of a planted bug -> the seed that the page names."""
    return {name: int(seed) for name, seed in ROW.findall(written())}


def written() -> str:
    """The tables as the page has them."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def rendered(bugs: Iterable[Bug], seeds: Mapping[str, int]) -> str:
    """The tables as they should be: first the faults that the product once had."""
    tables = {True: "**Mended faults**, each taken back:", False: "**Bugs as somebody might write them**:"}
    text = ""
    for mended, head in tables.items():
        rows = [f"| `{b.name}` | {b.world} | {b.what} | {seeds[b.name]} |" for b in bugs if b.mended is mended]
        text += "\n".join(
            ("", head, "", "| planted bug | world | what it does | seed |", "|---|---|---|---|", *rows, "")
        )
    return f"{text}\n"
