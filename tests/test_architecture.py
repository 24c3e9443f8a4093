"""The rules of the house that a reader can rely on, checked: who imports whom, what never
imports jax, and how long a file, a function and a signature may grow.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jlora"

# Open to every room: records and constants, without jax.
SHARED = {
    "types",
    "config",
    "errors",
    "validation",
    "gaps",
    "layout",
    "model.spec",
    "machine",
    "memory",
    "ports",
    "replica",
    "step_model",
}

# Room -> rooms it may import, beside itself and SHARED. `serve -> engine -> model -> pallas`.
MAY_IMPORT: dict[str, set[str]] = {
    "pallas": set(),
    "model": {"pallas"},
    "cache": {"model", "pallas"},
    "adapters": {"cache", "model.hf_names", "model.fields"},
    "engine": {"model", "pallas", "cache", "adapters"},
    "sim": {
        "engine.built",
        "engine.cold_start",
        "engine.engine",
        "engine.futures",
        "engine.loading",
        "engine.local",
        "engine.merging",
        "engine.plan",
        "engine.ports",
        "engine.records",
        "engine.scheduler",
        "engine.shelf",
        "engine.sources",
        "engine.switching",
        "adapters",
        "cache",
        "cluster",
        "serve",
    },
    "serve": {"engine", "model", "adapters", "cache"},
    "cluster": {"serve", "engine", "adapters", "model.config_json", "model.hub"},
    "loadgen": {"sim", "serve.client", "serve.flags", "serve.proto", "model.hf_names"},
    "doctor": {"engine", "model", "pallas", "cache", "adapters", "sim", "cluster.demand"},
    "demo": {"serve", "loadgen.server"},
}
# Tops: what a user starts. They may import every room, and no room imports them.
TOPS = {"__init__", "__main__", "llm", "cli"}

# What holds arrays and programs. Everything else runs without jax: the server and a simulator run the same objects.
MAY_USE_JAX = {
    "pallas",
    "cache.pool",
    "doctor",
    *(f"model.{name}" for name in ("checkpoint", "cut", "llama", "merge", "orbax", "packed", "place")),
    *(f"model.{name}" for name in ("sampling", "sharding", "step", "traced")),
    *(f"engine.{name}" for name in ("ahead", "assist", "batch", "build", "compile_cache", "compiles", "device")),
    *(f"engine.{name}" for name in ("lost", "merger", "one_row", "profiling", "runner", "share", "sizing", "slots")),
}
# Of the engine and the cache, what has a clock, a lock or a sleep of its own, and why.
OWN_TIME = {
    "engine.built": "seconds of a start",
    "engine.local": "locks around two assignments: nobody waits for them",
    **dict.fromkeys(("engine.device", "engine.ports"), "a default"),
    **dict.fromkeys(("engine.assist", "engine.one_row", "engine.share"), "measures a device, or emulates a link"),
    **dict.fromkeys(("engine.compiles", "engine.profiling", "engine.runner"), "counts by thread"),
}
JAX = {"jax", "jaxlib", "flax", "orbax"}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
KERNELS = "pallas"
# Signatures that may be longer, and why.
LONG_SIGNATURES = {
    "model.llama._attention": "one layer as an expression: the arrays it maps, and no state that a record could hold",
    "model.step._layers": "a jitted program: each argument has a sharding of its own, and one of them is donated",
}

# The tests that know the product's inside, and why.
INSIDE = {
    "tests/port.py": "the one place where other tests find it",
    "tests/cluster/_port.py": "its part for the cluster",
    "tests/cache/test_disk.py": "plants bugs in it",
    "tests/cache/test_planted_bugs.py": "plants bugs in it",
    "tests/engine/_planted.py": "plants bugs in it",
    "tests/sim/world/_answers.py": "plants bugs in it",
    "tests/sim/world/test_cluster.py": "plants bugs in it",
    "tests/sim/world/test_planted.py": "plants bugs in it",
}
DOCUMENTED = {"_fields", "_replace", "_asdict", "_exit", "_getframe"}  # Python's own, private by name only


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not re.search(r"_pb2(_grpc)?\.py$", path.name)]


def module_of(path: Path) -> str:
    """`engine.scheduler` for jlora/engine/scheduler.py; `engine` for its __init__."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module imported anywhere in the file, as `package.module`, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            base = node.module or ""
            for alias in node.names:  # `from jlora.model import llama` imports jlora.model.llama
                is_module = base.split(".")[0] == "jlora" and find(f"{base}.{alias.name}")
                yield (f"{base}.{alias.name}" if is_module else base), node.lineno


def find(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def inside(module: str, rooms: set[str]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def is_policy(module: str) -> bool:
    return not inside(module, MAY_USE_JAX)


def parsed(*folders: str) -> list[tuple[Path, ast.Module]]:
    return [(path, _parse(path)) for path in sources(*folders)]


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def test_imports_run_one_way():
    wrong = []
    for path, tree in parsed("jlora"):
        module = module_of(path)
        if module in TOPS:
            continue
        room = module.split(".")[0]
        if module in SHARED:
            allowed = SHARED
        else:
            assert room in MAY_IMPORT, f"{path}: a new room; say in MAY_IMPORT what it may import"
            allowed = MAY_IMPORT[room] | SHARED | {room}
        for name, line in imports(tree):
            top, _, inner = name.partition(".")
            if top == "jlora" and inner and not inside(inner, allowed):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_rooms_stand_on_each_other_without_a_circle():
    """So each can be read, and tested, after those that it stands on."""
    left = {room: {name.split(".")[0] for name in allowed} for room, allowed in MAY_IMPORT.items()}
    while bottom := {room for room, below in left.items() if not below & left.keys()}:
        left = {room: below for room, below in left.items() if room not in bottom}
    assert not left, f"these import each other in a circle: {left}"


def test_policy_files_do_not_import_jax():
    wrong = []
    for path, tree in parsed("jlora"):
        if is_policy(module_of(path)):
            wrong += [f"{path.relative_to(ROOT)}:{line} {n}" for n, line in imports(tree) if n.split(".")[0] in JAX]
    assert not wrong, "\n".join(wrong)


def test_what_plans_and_caches_has_no_clock_or_thread_of_its_own():
    """The simulator gives it others."""
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for path, tree in parsed("jlora/engine", "jlora/cache")
        if not inside(module_of(path), OWN_TIME)
        for target, line in imports(tree)
        if target in ("time", "threading")
    ]
    assert not found, "\n".join(found)


def test_one_place_turns_tokens_into_text():
    makers = {"Detokenizer", "StopFinder"}
    calls = [(path, node) for path, tree in parsed("jlora") for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = {(module_of(path), name) for path, node in calls if (name := _name_of(node.func)) in makers}
    assert made == {("serve.stream", name) for name in makers}


def test_no_code_of_the_engine_asks_whether_it_is_simulated():
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in parsed("jlora/engine", "jlora/cache", "jlora/adapters")
        for node in ast.walk(tree)
        for field in ("id", "attr", "arg", "name")
        if "simulat" in (name := str(getattr(node, field, "")))
    ]
    assert not found


def test_one_module_imports_ray():
    """The extra jlora[ray] stays one: everything else runs without it."""
    found = {
        module_of(path) for path, tree in parsed("jlora") for name, _ in imports(tree) if name.split(".")[0] == "ray"
    }
    assert found == {"cluster.ray_fleet"}


def test_importing_every_policy_module_does_not_load_jax():
    """Nor through what they import: checked in an interpreter of its own."""
    optional = {"__main__", "ray_fleet"}  # the second needs the extra jlora[ray]
    found = [module_of(path) for path in sources("jlora") if path.stem not in optional]
    modules = ["jlora." + module for module in found if is_policy(module)]
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    loaded = sorted({JAX!r} & set(sys.modules))
    assert not loaded, f"import {{name}} loads {{loaded}}"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_rules_name_modules_that_exist():
    """A file that is renamed or gone must not fall out of the rules unseen."""
    named = {*SHARED, *TOPS, *MAY_USE_JAX, *OWN_TIME, *MAY_IMPORT, *set().union(*MAY_IMPORT.values())}
    assert [module for module in sorted(named) if not find("jlora." + module)] == []


@pytest.mark.parametrize("folder", ["jlora", "tests", "benchmarks", "tools", "examples", "scripts"])
def test_files_are_short(folder: str):
    long = {
        str(p.relative_to(ROOT)): n for p in sources(folder) if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_functions_fit_a_screen_and_signatures_are_records():
    wrong, excused = [], set(LONG_SIGNATURES)
    for path, tree in parsed("jlora"):
        module = module_of(path)
        if module.split(".")[0] == KERNELS:
            continue
        for f in functions(tree):
            where = f"{path.relative_to(ROOT)}:{f.lineno} {f.name}"
            lines = (f.end_lineno or f.lineno) - f.lineno + 1
            names = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
            count = len([n for n in names if n not in ("self", "cls")])
            if lines > MAX_FUNCTION_LINES:
                wrong.append(f"{where}: {lines} lines, at most {MAX_FUNCTION_LINES}")
            if count > MAX_PARAMETERS and f"{module}.{f.name}" in LONG_SIGNATURES:
                excused.remove(f"{module}.{f.name}")
            elif count > MAX_PARAMETERS:
                wrong.append(f"{where}: {count} parameters, at most {MAX_PARAMETERS}; make a record")
    assert not wrong, "\n".join(wrong)
    assert not excused, f"no longer long, or gone: {sorted(excused)}"


def test_no_module_state_and_no_swallowed_errors():
    wrong = []
    for path, tree in parsed("jlora", "scripts", "examples"):
        where = path.relative_to(ROOT)
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                wrong.append(f"{where}:{node.lineno} global {', '.join(node.names)}")
            if isinstance(node, ast.ExceptHandler):
                if node.type is None:
                    wrong.append(f"{where}:{node.lineno} bare except")
                if _swallows(node):
                    wrong.append(f"{where}:{node.lineno} swallows every error")
    assert not wrong, "\n".join(wrong)


def _swallows(handler: ast.ExceptHandler) -> bool:
    """`except Exception: pass`: nothing is said, returned or raised."""
    broad = isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException", "ImportError")
    return broad and all(isinstance(s, ast.Pass | ast.Continue) for s in handler.body)


def test_tests_know_the_inside_through_their_port_alone():
    """So a change of what is private changes the port, and no test."""
    wrong = {}
    for path, tree in parsed("tests"):
        where = path.relative_to(ROOT).as_posix()
        found = [f"{where}:{line} {name}" for node in ast.walk(tree) for name, line in _foreign_privates(node)]
        wrong |= {where: found} if found else {}
    assert not [line for where in wrong.keys() - INSIDE.keys() for line in wrong[where]]
    assert INSIDE.keys() <= wrong.keys(), "no longer needed, or gone"


def _foreign_privates(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Private names of another object that the node takes, or replaces by name; or that it imports."""
    names: list[str] = []
    if isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.Call) and _name_of(node.func) in ("getattr", "setattr", "delattr", "object"):
        names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jlora"):
        names = [alias.name for alias in node.names]
    for name in names:
        if not re.match(r"_[^_]", name) or name in DOCUMENTED:
            continue
        if not (isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()")):
            yield name, getattr(node, "lineno", 0)


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_nothing_is_left_for_later():
    mark = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
    left = [
        f"{path.relative_to(ROOT)}:{i}"
        for path in sources("jlora", "tests", "benchmarks", "tools", "examples", "scripts")
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if mark.search(line)
    ]
    assert not left, "\n".join(left)


def test_modules_and_public_names_are_documented():
    wrong = []
    for path, tree in parsed("jlora"):
        where = path.relative_to(ROOT)
        if tree.body and ast.get_docstring(tree) is None:
            wrong.append(f"{where}: no module docstring")
        for node in tree.body:
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and not node.name.startswith("_") and ast.get_docstring(node) is None:
                wrong.append(f"{where}:{node.lineno} {node.name}: no docstring")
    assert not wrong, "\n".join(wrong)


def test_public_functions_are_annotated():
    wrong = []
    for path, tree in parsed("jlora"):
        for node in tree.body:
            owners = [node] if not isinstance(node, ast.ClassDef) else node.body
            for f in owners:
                if not isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) or f.name.startswith("_"):
                    continue
                args = [a for a in (*f.args.args, *f.args.kwonlyargs) if a.arg not in ("self", "cls")]
                if f.returns is None or any(a.annotation is None for a in args):
                    wrong.append(f"{path.relative_to(ROOT)}:{f.lineno} {f.name}")
    assert not wrong, "\n".join(wrong)
