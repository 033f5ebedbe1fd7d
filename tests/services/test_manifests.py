"""deploy/kubernetes: the schemas of Kubernetes itself judge the manifests; what they name is there; what they run runs.

No cluster is there where the tests run. So what is not shown is how one schedules, mounts and stops what they ask for.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import persist
from persist.core.errors import Unauthorized
from persist.core.shard_settings import bytes_of
from rpc.auth import mint
from rpc.cli.program import main, parser_for
from rpc.cli.serve import STOP_EXTRA_S
from rpc.settings import Limits, ServerSettings
from tests.support.dockerfile import stages
from tests.support.pages import ROOT, page
from tests.support.scopes_page import OPEN
from tests.support.server import Server
from tests.support.waiting import wait_until

HERE = ROOT / "deploy" / "kubernetes"
FILES = ("config.yaml", "server.yaml", "maintenance.yaml")
VERSIONS = ("1.29", "1.37")  # the oldest and the newest Kubernetes that the manifests are held to
SECRETS = {"persist-stores", "persist-tokens", "persist-maintenance"}  # docs/operations.md tells how to make them
SERVER_MIB = 512  # below which a server stays under any one attack: docs/operations.md
METRICS_PATHS = {"/healthz"}  # that maintenance answers
Document = dict[str, Any]


def documents(text: str | None = None) -> list[Document]:
    """All objects of the manifests, or those of a text."""
    texts = [text] if text is not None else [(HERE / name).read_text() for name in FILES]
    return [document for each in texts for document in yaml.safe_load_all(each)]


def against_schemas(found: list[Document], version: str) -> list[str]:
    """What the schemas of a version of Kubernetes complain of; fields that they do not know, too."""
    # Not at the top: whoever has an older environment still runs the other tests.
    checker = (
        importlib.import_module("kubernetes_validate")
        if os.environ.get("CI") == "true"
        else pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: run `make venv`")
    )
    complaints = []
    for document in found:
        try:
            checker.validate(document, version, strict=True)
        except checker.ValidationError as error:
            complaints.append(f"{document['kind']} {'.'.join(map(str, error.path))}: {error.message}")
    return complaints


def pods(found: list[Document]) -> Iterator[tuple[str, Document]]:
    """The template of every pod, and the name of what makes it."""
    for document in found:
        spec = document.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if "template" in spec:
            yield document["metadata"]["name"], spec["template"]


def complaints(found: list[Document]) -> list[str]:
    """What is wrong that no schema sees."""
    said = []
    for name, pod in pods(found):
        spec = pod["spec"]
        said += [f"{name}: {each}" for each in _of_pod(spec)]
        for container in spec["containers"]:
            said += [f"{name}: {each}" for each in _of_container(container, spec)]
        said += [f"{name}: there is no {each}" for each in _named(pod) - _there(found)]
    return said + _selected(found)


def _of_pod(spec: Document) -> list[str]:
    said, context = [], spec.get("securityContext", {})
    user = stages((ROOT / "deploy" / "Dockerfile").read_text())[-1].last("USER")
    if not context.get("runAsNonRoot") or f"{context.get('runAsUser')}:{context.get('runAsGroup')}" != user:
        said.append("it does not run as the user of the image")
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        said.append("it has no seccomp profile")
    if spec.get("automountServiceAccountToken") is not False:
        said.append("it gets a token of the cluster")
    least = ServerSettings().shutdown_s + STOP_EXTRA_S
    if spec.get("restartPolicy") is None and spec.get("terminationGracePeriodSeconds", 0) <= least:
        said.append(f"it has less than {least} s to end")
    return said


def _of_container(container: Document, spec: Document) -> list[str]:
    said, context = [], container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False or not context.get("readOnlyRootFilesystem"):
        said.append("it may get privileges, or write to its image")
    if context.get("capabilities") != {"drop": ["ALL"]}:
        said.append("it keeps capabilities")
    if not re.search(r":\d+\.\d+\.\d+$", container["image"]):
        said.append("its image has no version")
    resources = container.get("resources", {})
    if not {"cpu", "memory"} <= resources.get("requests", {}).keys() or "memory" not in resources.get("limits", {}):
        said.append("it asks for no cpu or memory, or has no limit of memory")
    if "cpu" in resources.get("limits", {}):
        said.append("it is throttled")
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
    if mounts != volumes or "tmp" not in mounts:
        said.append("its mounts are not its volumes, or it has no /tmp")
    ports = {port["name"] for port in container.get("ports", [])}
    paths = {door.removeprefix("GET ") for door in OPEN} if "http" in ports else METRICS_PATHS
    for probe in (container[kind]["httpGet"] for kind in container if kind.endswith("Probe")):
        if probe["port"] not in ports or probe["path"] not in paths:
            said.append(f"nobody answers {probe['path']} at {probe['port']}")
    if "readinessProbe" in container and "preStop" not in container.get("lifecycle", {}):
        said.append("requests still come to one that ends, and are refused")
    if container.get("livenessProbe", {}).get("httpGet", {}).get("path") == "/readyz":
        said.append("a store that is away restarts it")
    return said


def _named(pod: Document) -> set[str]:
    """The objects that a pod needs."""
    text = json.dumps(pod)
    found = {f"ConfigMap {name}" for name in re.findall(r'"configMap(?:Ref)?": {"name": "([^"]+)"', text)}
    found |= {f"Secret {name}" for name in re.findall(r'"secret(?:Ref|KeyRef)": {"name": "([^"]+)"', text)}
    found |= {f"Secret {name}" for name in re.findall(r'"secretName": "([^"]+)"', text)}
    return found | {f"ServiceAccount {pod['spec']['serviceAccountName']}"}


def _there(found: list[Document]) -> set[str]:
    return {f"{each['kind']} {each['metadata']['name']}" for each in found} | {f"Secret {name}" for name in SECRETS}


def _selected(found: list[Document]) -> list[str]:
    """Selectors that fit no pods, and budgets that let all of them go at once."""
    said = []
    labels = [pod["metadata"]["labels"] for _, pod in pods(found)]
    replicas = {each["metadata"]["name"]: each["spec"]["replicas"] for each in found if each["kind"] == "StatefulSet"}
    for each in found:
        selector = each.get("spec", {}).get("selector", {})
        selector = selector.get("matchLabels", selector)
        if selector and not any(selector.items() <= fit.items() for fit in labels):
            said.append(f"{each['kind']} {each['metadata']['name']} selects nothing")
        if each["kind"] == "PodDisruptionBudget" and each["spec"]["maxUnavailable"] >= min(replicas.values()):
            said.append("all servers may be taken away at once")
    return said


def of_kind(kind: str, name: str) -> Document:
    (found,) = [each for each in documents() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def container_of(kind: str, name: str) -> Document:
    spec = of_kind(kind, name)["spec"]["template"]["spec"]
    found: Document = spec["containers"][0]
    return found


def mib(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", size).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


# --- they are sound


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field_of_them(version: str) -> None:
    assert against_schemas(documents(), version) == []


def test_they_keep_what_no_schema_sees() -> None:
    assert complaints(documents()) == []
    assert len(list(pods(documents()))) == 3


def test_the_list_names_every_file_and_every_image() -> None:
    (listed,) = documents((HERE / "kustomization.yaml").read_text())
    assert tuple(listed["resources"]) == FILES
    assert {path.name for path in HERE.iterdir()} == {*FILES, "kustomization.yaml"}
    [image] = listed["images"]
    assert image.keys() == {"name", "newName", "newTag"}
    images = {container["image"] for _, pod in pods(documents()) for container in pod["spec"]["containers"]}
    assert images == {f"{image['name']}:{image['newTag']}"}


def test_the_page_makes_the_image_the_namespace_and_every_secret_that_the_list_names() -> None:
    (listed,) = documents((HERE / "kustomization.yaml").read_text())
    [image], said = listed["images"], page("docs/operations.md")
    assert f"docker push {image['newName']}:{image['newTag']}\n" in said
    assert f"kubectl create namespace {listed['namespace']}\n" in said
    assert set(re.findall(rf"kubectl -n {listed['namespace']} create secret generic (\S+)", said)) == SECRETS


# --- what they run


def test_the_commands_can_be_typed() -> None:
    for _, pod in pods(documents()):
        command, *words = pod["spec"]["containers"][0]["args"]
        parser_for(command).parse_args([command, *words])


def test_maintenance_asks_the_servers_that_there_are() -> None:
    servers = of_kind("StatefulSet", "persist")["spec"]
    urls = [f"http://persist-{number}.{servers['serviceName']}:8787" for number in range(servers["replicas"])]
    assert f"--url={','.join(urls)}" in container_of("Deployment", "persist-maintenance")["args"]
    assert of_kind("Service", servers["serviceName"])["spec"]["publishNotReadyAddresses"] is True


def test_a_server_and_maintenance_have_the_memory_and_the_room_that_they_may_need() -> None:
    assert mib(container_of("StatefulSet", "persist")["resources"]["limits"]["memory"]) >= SERVER_MIB
    (merging,) = [
        bytes_of(word.partition("=")[2]) // 1024**2
        for word in container_of("Deployment", "persist-maintenance")["args"]
        if word.startswith("--memory=")
    ]
    limit = container_of("Deployment", "persist-maintenance")["resources"]["limits"]["memory"]
    assert mib(limit) >= merging + merging // 2
    (room,) = [
        volume["emptyDir"]["sizeLimit"]
        for volume in of_kind("StatefulSet", "persist")["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "tmp"
    ]
    assert mib(room) * 1024**2 > Limits().spool_bytes_max


def test_a_server_could_start_with_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, settings = tmp_path / "tokens.json", tmp_path / "persist.toml"
    tokens.write_text('{"tokens": []}')
    text = of_kind("ConfigMap", "persist-settings")["data"]["persist.toml"]
    settings.write_text(text.replace("/etc/persist/tokens/tokens.json", str(tokens)))
    stores = {**of_kind("ConfigMap", "persist-location")["data"], "PERSIST_CONSENSUS": "postgresql://p:secret@db/p"}
    for name in [name for name in os.environ if name.startswith("PERSIST_")]:
        monkeypatch.delenv(name)
    with monkeypatch.context() as restored:
        restored.setattr(os, "environ", {**os.environ, **stores})  # what the file says is put there
        assert main(["serve", "--config", str(settings), "--check"]) == 0
    shown = capsys.readouterr().out
    assert 'blob = "s3://bucket/prefix"' in shown
    assert "maintenance = false" in shown
    assert "secret" not in shown


def test_a_token_that_is_new_in_the_secret_is_good_without_a_restart(tmp_path: Path) -> None:
    """A Secret is mounted as a directory of links into another one; a change swaps one link, and no file."""
    entries, secrets = {}, {}
    for name in ("first", "second"):
        secrets[name], sha256 = mint(name)
        entries[name] = {"id": name, "sha256": sha256, "scopes": ["admin"]}

    def put(number: int, names: list[str]) -> None:
        made = tmp_path / f"..{number}"
        made.mkdir()
        (made / "tokens.json").write_text(json.dumps({"tokens": [entries[name] for name in names]}))
        (made / "tokens.json").chmod(0o440)
        (tmp_path / "..new").symlink_to(made.name)
        (tmp_path / "..new").rename(tmp_path / "..data")

    put(1, ["first"])
    (tmp_path / "tokens.json").symlink_to("..data/tokens.json")
    with Server(tmp_path / "data", "--tokens", str(tmp_path / "tokens.json")) as server:

        def is_good(name: str) -> bool:
            try:
                with persist.connect(server.url, token=secrets[name]) as client:
                    client.shards()
            except Unauthorized:
                return False
            return True

        assert is_good("first")
        assert not is_good("second")
        put(2, ["second"])
        wait_until(lambda: is_good("second"), "the new token is good")
        assert not is_good("first")
