"""Makes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` from each `.proto`: `python -m tools.proto`.

The results are committed, so that a user needs no protoc. Generated code asks for a protobuf and
grpcio at least as new as the tools that made it: raise the lower bounds in pyproject.toml too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    ROOT / "jlora/serve/proto/jlora.proto",
    ROOT / "jlora/cluster/proto/link.proto",
    ROOT / "jlora/cluster/proto/directory.proto",
)
HEADER = "# ruff: noqa\n# fmt: off\n"


def main() -> int:
    """Writes three modules beside each source; returns protoc's exit code."""
    outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    if code := protoc.main(["protoc", f"-I{ROOT}", *outputs, *map(str, SOURCES)]):
        return code
    for source in SOURCES:
        for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
            path = source.with_name(source.stem + end)
            path.write_text(HEADER + path.read_text())
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
