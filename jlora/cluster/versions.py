"""Which version of its adapter answers a request."""

from __future__ import annotations

from jlora.adapters.invocation import NotInvoked, last_occurrence
from jlora.cluster.directory import Directory, Version
from jlora.replica import ReplicaInfo
from jlora.types import Request


def version_of(directory: Directory, request: Request, info: ReplicaInfo | None) -> Version | None:
    """The version that answers it now; None is the base.

    Args:
        info: of the service; None before it is known.

    Raises NotFound, InvalidArgument as `Replica.submit`.
    """
    if request.adapter is None:
        return None
    version = directory.current(request.adapter)
    tokens = version.alora_invocation_tokens
    if tokens and info is not None and info.config.adapters.alora_missing == "error":
        if last_occurrence(request.prompt, tokens) is None:
            raise NotInvoked(request.adapter, tokens)
    return version


def held(directory: Directory, request: Request, info: ReplicaInfo | None) -> Version | None:
    """As `version_of`; the version is in use from now on, until `Directory.end`.

    It tries again if the version was replaced in between, because that one may be dropped already.
    """
    while (version := version_of(directory, request, info)) is not None:
        directory.begin(version)
        stays = False
        try:
            stays = directory.current(version.name).key == version.key
        finally:
            if not stays:
                directory.end(version)
        if stays:
            return version
    return None
