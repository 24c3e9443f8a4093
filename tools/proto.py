"""Makes `jlora_pb2.py`, `jlora_pb2.pyi` and `jlora_pb2_grpc.py` from `jlora.proto`: `python -m tools.proto`.

The results are committed, so that a user needs no protoc. Generated code asks for a protobuf and
grpcio at least as new as the tools that made it: raise the lower bounds in pyproject.toml too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "jlora/serve/proto/jlora.proto"
HEADER = "# ruff: noqa\n# fmt: off\n"


def main() -> int:
    """Writes the three modules beside the source; returns protoc's exit code."""
    outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    if code := protoc.main(["protoc", f"-I{ROOT}", *outputs, str(SOURCE)]):
        return code
    for name in ("jlora_pb2.py", "jlora_pb2.pyi", "jlora_pb2_grpc.py"):
        path = SOURCE.with_name(name)
        path.write_text(HEADER + path.read_text())
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
