"""docker-compose.yml: its syntax, and what it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from blob.s3 import S3Settings
from consensus import open_consensus
from rpc.cli.program import parser_for

ROOT = Path(__file__).resolve().parents[2]


def complaints(services: dict[str, Any], volumes: dict[str, Any]) -> list[str]:
    """What is less safe, or less sure to come up, than it should be; empty if nothing is."""
    found = []
    for name, service in services.items():
        found += [f"{name}: {complaint}" for complaint in _of_service(service, services, volumes)]
    return found


def _of_service(service: dict[str, Any], services: dict[str, Any], volumes: dict[str, Any]) -> list[str]:
    recipe = recipe_of(service)
    bases = re.findall(r"^FROM (\S+)", recipe, re.M)
    pinned = r":v?\d+\.\d+\.\d+|:RELEASE\.\d{4}-\d\d-\d\d"
    found = [f"base {base} has no pinned version" for base in bases if not re.search(pinned, base)]
    if not re.search(r":[\w.-]*\d[\w.-]*$|:local$", service.get("image", "")):
        found.append("image has no pinned version")
    ports = [port for port in service.get("ports", []) if not re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)]
    found += [f"port {port} is not published on loopback" for port in ports]
    found += [f"volume {one} is not declared" for one in service.get("volumes", []) if one.split(":")[0] not in volumes]
    for other, how in service.get("depends_on", {}).items():
        if how["condition"] == "service_healthy" and "healthcheck" not in services[other]:
            found.append(f"waits for the health of {other}, which has no health check")
    return found + _unconfined(service, services, recipe)


def recipe_of(service: dict[str, Any]) -> str:
    """The Dockerfile of a service, wherever it stands; empty where nothing is built for it."""
    build = service.get("build", {})
    named = build.get("dockerfile")
    return (ROOT / named).read_text() if named else str(build.get("dockerfile_inline", ""))


def _unconfined(service: dict[str, Any], services: dict[str, Any], recipe: str) -> list[str]:
    """What a process of it may do that it need not."""
    found = []
    if service.get("read_only") is not True:
        found.append("its file system is writable")
    if service.get("cap_drop") != ["ALL"]:
        found.append("it keeps capabilities")
    if "no-new-privileges:true" not in service.get("security_opt", []):
        found.append("it may get new privileges")
    made_by = [one for one in services.values() if one.get("image") == service["image"] and "build" in one]
    recipes = [recipe, *map(recipe_of, made_by)]
    users = [user for text in recipes for user in re.findall(r"^USER (\S+)", text, re.M)[-1:]]
    if str(service.get("user", users[0] if users else "root")).split(":")[0] in ("root", "0"):
        found.append("it runs as root")
    return found


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return document


def test_the_file_is_sound(compose: dict[str, Any]) -> None:
    assert complaints(compose["services"], compose["volumes"]) == []


def test_every_server_is_there_with_a_health_check_and_a_volume(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"minio", "bucket", "postgres", "etcd", "server", "compactor"}
    for name in ("minio", "postgres", "etcd"):
        assert services[name]["healthcheck"]["test"]
        assert services[name]["volumes"]
    assert services["server"]["healthcheck"]["test"]


def test_server_and_compactor_are_wired_to_the_stores(compose: dict[str, Any]) -> None:
    for name in ("server", "compactor"):
        environment = compose["services"][name]["environment"]
        blob = S3Settings.from_url(environment["PERSIST_BLOB"])
        assert blob.endpoint == "http://minio:9000"
        assert f"local/{blob.bucket}" in compose["services"]["bucket"]["command"][0]
        consensus = open_consensus(environment["PERSIST_CONSENSUS"])
        assert consensus.url == "postgresql://persist@postgres:5432/persist"
        consensus.close()
        assert (
            environment["AWS_SECRET_ACCESS_KEY"] == compose["services"]["minio"]["environment"]["MINIO_ROOT_PASSWORD"]
        )
        postgres = compose["services"]["postgres"]["environment"]
        assert f"{postgres['POSTGRES_USER']}:{postgres['POSTGRES_PASSWORD']}@" in environment["PERSIST_CONSENSUS"]


@pytest.mark.parametrize(("service", "command"), [("server", "serve"), ("compactor", "maintain")])
def test_the_commands_are_those_of_the_program(compose: dict[str, Any], service: str, command: str) -> None:
    words = compose["services"][service]["command"]
    assert words[0] == command
    parser_for(command).parse_args(words)


def test_the_image_is_that_of_the_deployment(compose: dict[str, Any]) -> None:
    build = compose["services"]["server"]["build"]
    assert build == {"context": ".", "dockerfile": "deploy/Dockerfile"}
    assert compose["services"]["compactor"]["image"] == compose["services"]["server"]["image"]
