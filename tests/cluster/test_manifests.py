"""Manifests and Dockerfiles: Kubernetes' own schemas accept them, and our command line accepts what they say."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import jax
import jsonschema
import kubernetes_validate
import pytest
import yaml

from jlora.cluster import cli
from jlora.cluster.ray_process import SETTINGS
from jlora.serve import flags

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "configs" / "kubernetes").glob("*.yaml"))
DOCKERFILES = sorted((ROOT / "configs" / "docker").glob("*.Dockerfile"))
KUBERNETES = "1.33"

# KubeRay's schema is not on a package index: these are the fields that we use. Pods are checked by Kubernetes' own.
GROUP = {
    "type": "object",
    "required": ["rayStartParams", "template"],
    "additionalProperties": False,
    "properties": {
        "groupName": {"type": "string", "minLength": 1},
        **{name: {"type": "integer", "minimum": 0} for name in ("replicas", "minReplicas", "maxReplicas")},
        "numOfHosts": {"type": "integer", "minimum": 1},
        "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
        "template": {"type": "object", "required": ["spec"]},
    },
}
RAY_CLUSTER = {
    "type": "object",
    "required": ["headGroupSpec"],
    "additionalProperties": False,
    "properties": {
        "rayVersion": {"type": "string"},
        "authOptions": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"mode": {"enum": ["token", "disabled"]}, "secretName": {"type": "string"}},
        },
        "headGroupSpec": GROUP,
        "workerGroupSpecs": {"type": "array", "items": {**GROUP, "required": [*GROUP["required"], "groupName"]}},
    },
}


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for one in yaml.safe_load_all(path.read_text()):
            yield f"{path.stem}-{one['kind']}-{one['metadata']['name']}", one


DOCUMENTS = dict(documents())


def templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document.get("spec", {})
    if document["kind"] == "RayCluster":
        return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return [spec["template"]] if "template" in spec else []


def pod_specs() -> Iterator[dict[str, Any]]:
    for document in DOCUMENTS.values():
        yield from (template["spec"] for template in templates(document))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_kubernetes_accepts_it(name: str):
    document = DOCUMENTS[name]
    if document["kind"] == "RayCluster":
        assert document["apiVersion"] == "ray.io/v1"
        jsonschema.validate(document["spec"], RAY_CLUSTER)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    for template in templates(document):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_the_validator_finds_a_wrong_field():
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"ports": [{"prot": 1}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_names_meet():
    """Claims, secrets and maps of the pods are made by a manifest, or by the operator as the docs say."""
    ours = {"jlora-models", "jlora-adapters", "jlora-token", "jlora-keys", "jlora-ray"}
    made = {document["metadata"]["name"] for document in DOCUMENTS.values()}
    guide = (ROOT / "docs" / "cluster.md").read_text()
    assert [name for name in ours if name not in guide] == []
    for spec in pod_specs():
        mounts = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert mounts - {"cache"} <= volumes.keys()
        for volume in volumes.values():
            for kind, key in (
                ("configMap", "name"), ("secret", "secretName"), ("persistentVolumeClaim", "claimName"),
            ):  # fmt: skip
                if kind in volume:
                    assert volume[kind][key] in made | ours


def test_rays_pods_have_our_settings_of_ray():
    rays = [one for name, one in DOCUMENTS.items() if one["kind"] == "RayCluster"]
    containers = [made for one in rays for template in templates(one) for made in template["spec"]["containers"]]
    assert len(containers) >= 3
    for container in containers:
        env = {each["name"]: each.get("value") for each in container["env"]}
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_gcs_rpc_server_reconnect_timeout_s", "RAY_worker_niceness"):
            assert env[name] == SETTINGS[name]


def commands() -> Iterator[list[str]]:
    """What the containers run, as arguments of `jlora`."""
    for spec in pod_specs():
        for container in spec["containers"]:
            args = container["args"]
            if "command" not in container:
                yield args
            elif found := re.search(r"exec jlora (.*)", args[0].replace("\\\n", " "), re.DOTALL):
                yield found[1].split()


def test_our_command_line_accepts_what_the_containers_run(tmp_path: Path):
    config = DOCUMENTS["service-ConfigMap-jlora"]["data"]["cluster.toml"]
    tomllib.loads(config)
    path = tmp_path / "cluster.toml"
    path.write_text(config.replace('"/adapters"', f'"{tmp_path}"'))
    parsed = []
    for command in commands():
        assert command.pop(0) == "cluster"
        command[command.index("--config") + 1] = str(path)
        if command[0] == "replica":
            parsed.append(flags.parse(command[1:]))
        else:
            parsed.append(cli.parse(command))
    assert [(c.cluster.fleet, c.model.tp, c.serve.http_port) for c in parsed] == [
        ("static", 1, 8000), ("ray", 1, 8000), ("static", 1, -1), ("static", 4, -1), ("static", 1, 8000),
    ]  # fmt: skip
    assert [c.cluster.controller for c in parsed] == ["jlora-controller:50051", "", "", "", ""]
    assert all(c.cluster.token_file == "/run/jlora/token" and c.serve.drain_s < 60 for c in parsed)


def test_what_a_pod_writes_is_its_users():
    """A new volume is root's; the images run as another user."""
    user = {int(found) for path in DOCKERFILES for found in re.findall(r"^USER (\d+)$", path.read_text(), re.MULTILINE)}
    assert len(user) == 1
    for spec in pod_specs():
        writes = [m for c in spec["containers"] for m in c["volumeMounts"] if not m.get("readOnly")]
        assert not writes or {spec["securityContext"]["fsGroup"], spec["securityContext"]["runAsUser"]} == user


def test_every_pod_says_how_it_is_probed_and_has_time_to_drain():
    """KubeRay would probe with programs that the images have not."""
    for spec in pod_specs():
        assert spec["terminationGracePeriodSeconds"] >= 60
        for container in spec["containers"]:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


def test_a_policy_lets_in_what_a_pod_needs():
    """Ray's nodes talk on ports that they choose, so the policy of plain replicas is not for them."""
    policies = {d["metadata"]["name"]: d["spec"] for d in DOCUMENTS.values() if d["kind"] == "NetworkPolicy"}
    ray = next(d for d in DOCUMENTS.values() if d["kind"] == "RayCluster")
    labels = [template["metadata"]["labels"] for template in templates(ray)]
    plain = policies["jlora-replicas"]["podSelector"]["matchLabels"]
    assert not any(plain.items() <= one.items() for one in labels)
    own = policies["jlora-ray"]["podSelector"]["matchLabels"]
    assert [own.items() <= one.items() for one in labels] == [False, True, True]
    assert all("ports" not in rule for rule in policies["jlora-ray"]["ingress"])


def test_followers_find_the_controller_and_clients_find_both():
    """The service whose name followers are given, and the one that clients use, by the labels of the pods."""
    controller = DOCUMENTS["routers-Deployment-jlora-router"]["spec"]
    follower = DOCUMENTS["followers-Deployment-jlora-follower"]["spec"]
    pods = [one["template"]["metadata"]["labels"] for one in (controller, follower)]

    def found(name: str) -> list[bool]:
        selector = DOCUMENTS[name]["spec"]["selector"]
        return [selector.items() <= labels.items() for labels in pods]

    assert found("followers-Service-jlora-controller") == [True, False]
    assert found("service-Service-jlora") == [True, True]
    (rule,) = DOCUMENTS["service-NetworkPolicy-jlora-replicas"]["spec"]["ingress"]
    admitted = [source["podSelector"]["matchLabels"].items() for source in rule["from"]]
    assert all(any(one <= labels.items() for one in admitted) for labels in pods), "both reach the replicas"
    for own, other in (controller, pods[1]), (follower, pods[0]):
        selector = own["selector"]["matchLabels"].items()
        assert selector <= own["template"]["metadata"]["labels"].items() and not selector <= other.items()
    volumes = [{volume["name"] for volume in one["template"]["spec"]["volumes"]} for one in (controller, follower)]
    assert volumes[0] - volumes[1] == {"state"}, "only the controller has the registry"


def test_the_script_compiles_what_an_images_user_cannot():
    """Without bytecode each process compiles all that it imports, which takes longer than its other work."""
    unused = Path(jax.__file__).parent / "experimental", Path(cli.__file__).parent / "doctor"  # by this process
    sources = [path for folder in unused for path in folder.rglob("*.py")]
    assert len(sources) > 50
    assert [path for path in sources if not Path(cache_from_source(str(path))).exists()] == []


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_are_set_up_by_the_script_of_continuous_integration(path: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = path.read_text()
    runs = re.findall(r"^RUN (sh \S+).*--extras (\S+)$", text, re.MULTILINE)
    assert [script for script, _ in runs] == ["sh scripts/setup.sh"]
    assert set(runs[0][1].split(",")) <= set(project["optional-dependencies"])
    assert "scripts/setup.sh" in (ROOT / ".ci" / "run").read_text()
    for source in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split())
    assert f"configs/docker/{path.name}" in text
    image = f"jlora:{path.stem.partition('.')[0]}"
    assert image in text and image in " ".join(p.read_text() for p in MANIFESTS)
