"""What no line of the package may do, read from its source: run data as code, fetch what a caller names, measure a
duration by a clock that jumps, or compare a secret in a time that tells how much of it was right.

Every rule is tried on a line that breaks it, too: a rule that finds nothing would prove nothing.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator

import pytest

from jlora.serve.proto import jlora_pb2 as pb
from tests.test_architecture import PACKAGE, sources

# They build objects of any class from bytes, or run what they read (C1, C3).
READS_CODE = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "yaml", "torch"}
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
# Modules that name what they import; each takes it from a table or a constant of its own (C4).
IMPORTERS = {"cli", "cluster.child", "cluster.cli", "engine.compile_cache", "serve.console", "sim.world.report"}
# They open connections to addresses that they are given (C7). The hub's files come before the server listens.
FETCHES = {"urllib.request", "http.client", "requests", "httpx", "aiohttp", "urllib3", "ftplib", "huggingface_hub"}
FETCHERS = {"model.hub"}
SHARES_MEMORY = {"multiprocessing.shared_memory", "posix_ipc", "mmap"}  # (C23)
# They say when something was, to people and to other processes, or compare it with a file's time (F12). All else
# measures durations, by the monotonic clock.
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
WALL_CLOCKS = {
    "cluster.scratch", "doctor.engine_fit", "doctor.job", "engine.ports", "loadgen.cli", "ports", "serve.generation",
    "serve.http.answers", "serve.http.dashboard", "serve.http.metrics", "serve.http.models", "serve.strip",
    "serve.template",
}  # fmt: skip
# Where secrets are compared (C10), and what they are called there.
SECRET_ROOMS = ("serve/access/access.py", "serve/access/keys.py", "cluster/secret.py")
SECRETS = {"token", "_token", "key", "secret", "sha256", "digest", "authorization", "sent", "one", "other"}

Rule = Callable[[ast.AST], bool]


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports, as the names of what it binds."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imports(modules: set[str]) -> Rule:
    return lambda node: any(name in modules or name.partition(".")[0] in modules for name in imported(node))


def runs_code(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNS_CODE


def loads_numpy(node: ast.AST) -> bool:
    """`np.load` and its like: with `allow_pickle` they unpickle, and nothing here needs them without."""
    if isinstance(node, ast.keyword):
        return node.arg in ("allow_pickle", "trust_remote_code", "weights_only")
    return isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) in ("np", "numpy", "jnp")


def imports_by_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("import_module", "spec_from_file_location", "run_path")


def reads_the_wall_clock(node: ast.AST) -> bool:
    names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else imported(node)
    return any(name in WALL or name.removeprefix("datetime.") in WALL for name in names)


def compares_a_secret(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare) or not any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
        return False
    parts = [node.left, *node.comparators]
    if any(isinstance(part, ast.Constant) for part in parts):  # what the source has is no secret
        return False
    return any(
        isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part).split(".")[-1] in SECRETS for part in parts
    )


def environments(node: ast.AST) -> bool:
    """A way to jinja without its sandbox, or with the one whose templates may change what they are given."""
    free = {"jinja2.Environment", "jinja2.Template", "jinja2.sandbox.SandboxedEnvironment"}
    return bool(free & set(imported(node))) or (isinstance(node, ast.Attribute) and ast.unparse(node) in free)


RULES: dict[str, tuple[Rule, set[str], str]] = {
    "reads code": (imports(READS_CODE), set(), "from pickle import loads"),
    "runs code": (runs_code, set(), "exec(text)"),
    "loads objects": (loads_numpy, set(), "np.load(path, allow_pickle=True)"),
    "trusts remote code": (loads_numpy, set(), "from_pretrained(path, trust_remote_code=True)"),
    "imports by name": (imports_by_name, IMPORTERS, "importlib.import_module(config['auto_map'])"),
    "fetches": (imports(FETCHES), FETCHERS, "import urllib.request"),
    "shares memory": (imports(SHARES_MEMORY), set(), "from multiprocessing import shared_memory"),
    "reads the wall clock": (reads_the_wall_clock, WALL_CLOCKS, "left = deadline - time.time()"),
    "templates without a sandbox": (environments, set(), "jinja2.Environment()"),
}


@functools.cache
def nodes() -> dict[str, list[ast.AST]]:
    """Module -> all of its syntax."""
    names = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sources("jlora")}
    return {name: list(ast.walk(ast.parse(path.read_text()))) for name, path in names.items()}


def modules_that(rule: Rule) -> Iterator[str]:
    return (name for name, parts in nodes().items() if any(map(rule, parts)))


@pytest.mark.parametrize("name", RULES)
def test_no_module_but_those_named(name: str):
    rule, allowed, breaks_it = RULES[name]
    assert set(modules_that(rule)) == allowed
    assert any(map(rule, ast.walk(ast.parse(breaks_it))))


def test_secrets_are_compared_in_constant_time():
    for room in SECRET_ROOMS:
        text = (PACKAGE / room).read_text()
        assert "compare_digest(" in text or "equal(" in text
        assert [ast.unparse(node) for node in ast.walk(ast.parse(text)) if compares_a_secret(node)] == []
    assert any(map(compares_a_secret, ast.walk(ast.parse("if self._token == given: pass"))))
    assert {path.name for path in sources("jlora") if "compare_digest" in path.read_text()} == {"keys.py"}


def fields(message) -> Iterator:  # noqa: ANN001 - descriptors have no types
    """The fields of a message and of the messages in it."""
    for field in message.fields:
        yield field
        if field.message_type is not None:
            yield from fields(field.message_type)


def test_no_request_has_tensors_pickles_or_hashes():
    """C13 and C22: what a client may send is text, token ids and numbers. Nothing names a block or a cache entry."""
    asked = [m.input_type for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods]
    kinds = {field.full_name for message in asked for field in fields(message) if field.type == field.TYPE_BYTES}
    assert kinds == set()
    names = {field.name for message in asked for field in fields(message)}
    assert {"token_ids", "cache_salt", "tenant"} <= names
    assert not {name for name in names if any(word in name for word in ("hash", "block", "embed", "tensor", "url"))}
