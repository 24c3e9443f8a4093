"""Every parser of something that comes from outside, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.fuzz import _adapters, _cluster, _files, _fronts, _replicas, _text, _tree
from tests.fuzz._engine import Target

TARGETS: Mapping[str, Callable[[], Target]] = {
    "config": _adapters.config,
    "weights": _adapters.weights,
    "names": _adapters.names,
    "protobuf": _fronts.protobuf,
    "http": _fronts.http,
    "template": _text.template,
    "tree": _tree.tree,
    "cache": _tree.cache,
    "link-replica": _cluster.link_replica,
    "link-router": _replicas.link_router,
    "directory": _cluster.directory,
    "table": _cluster.table,
    "peer": _cluster.peer,
    "toml": _files.toml,
    "keys": _files.keys,
    "registry": _files.registry,
}
