"""Makes `jlora_pb2.py`, `jlora_pb2.pyi` and `jlora_pb2_grpc.py` from `jlora.proto`.

    pip install grpcio-tools
    python -m jlora.serve.proto.generate

The results are committed, so that a user needs no protoc. Generated code asks for a protobuf and
grpcio at least as new as the tools that made it: raise the lower bounds in pyproject.toml too.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "jlora.proto"
HEADER = "# ruff: noqa\n# fmt: off\n"


def generate(root: Path | None = None) -> list[Path]:
    """Writes the three modules below `root` (default: the checkout) and returns their paths.

    Raises:
        RuntimeError: protoc refused the file (it has printed why).
    """
    from grpc_tools import protoc  # needed by whoever changes the interface only

    checkout = SOURCE.parents[3]
    out = root or checkout
    code = protoc.main(
        ["protoc", f"-I{checkout}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", str(SOURCE)]
    )
    if code != 0:
        raise RuntimeError(f"protoc ended with code {code}")
    folder = out / SOURCE.parent.relative_to(checkout)
    made = [folder / name for name in ("jlora_pb2.py", "jlora_pb2.pyi", "jlora_pb2_grpc.py")]
    for path in made:
        path.write_text(HEADER + path.read_text())
    return made


if __name__ == "__main__":
    sys.stdout.writelines(f"wrote {path.name}\n" for path in generate())
