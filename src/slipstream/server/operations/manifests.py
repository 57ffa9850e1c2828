"""Files to run a server in containers: a Dockerfile, a Docker Compose file, Kubernetes objects. No
torch.

All three start `slipstream serve` with the same arguments, and stop it by SIGTERM with the time it
needs for the requests in flight. Probes are the server's own: `/live`, and `/ready`, which answers
503 while it drains.

A replica has a volume at its home folder for fetched models, packed weights and compiled kernels.
The rest of its file system is read-only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.errors import ConfigError

HOME, USER, PORT = "/home/slipstream", 10001, 8000
KEYS = "/run/slipstream/keys"
"""Folder of the secret with the keys. Its file `keys` has one key per line."""

START_S = 1800
"""Maximum seconds of the first start, which fetches the model."""

GRACE_S = 15
"""Seconds for ending the processes, in addition to the time for running requests."""

LEAVE_S = 5
"""Seconds for which a stopping replica still answers while Kubernetes removes it from its
services."""

_NAMESPACE = "POD_NAMESPACE"
"""Environment variable of a pod. Kubernetes replaces `$(POD_NAMESPACE)` in the arguments by its
value."""

DOCKERFILE, COMPOSE, KUBERNETES = "Dockerfile", "compose.yaml", "kubernetes.yaml"

IMAGE = (
    r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?(:\d{1,5})?/)?"  # a registry
    r"[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*)*"
    r"(:\w[-.\w]{0,127})?(@sha256:[0-9a-f]{64})?"
)
"""Regular expression of a reference to an image, as Docker and Kubernetes read it."""

LEAST = {"memory": 2**28, "volume": 2**28}
"""Minimum bytes by option. A smaller number was probably meant in another unit."""

_NAME = r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?"

BASE = "python:3.12.12-slim-bookworm"
"""Base image. It has glibc 2.36, so the wheel built in it runs in it."""

READY = ["python", "-c", f"import urllib.request as u; u.urlopen('http://127.0.0.1:{PORT}/ready')"]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A deployment. `words`: the arguments of `slipstream serve` without address, port and keys.
    Sizes are in bytes."""

    words: Sequence[str]
    drain_s: float
    name: str = "slipstream"
    image: str = f"slipstream:{__version__}"
    replicas: int = 1
    cpus: int = 4
    gpus: int = 0
    memory: int = 8 * 2**30
    volume: int = 50 * 2**30
    extras: Sequence[str] = ()
    key_secret: str | None = None

    def check(self) -> None:
        """Raise ConfigError for an invalid option of `slipstream manifests`."""
        for name in ("replicas", "cpus"):
            if getattr(self, name) < 1:
                message = f"--{name} must be at least 1, got {getattr(self, name)}"
                raise ConfigError(message, field=name)
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                message = f"must be at least {least >> 20}MiB, got {getattr(self, name)} bytes"
                raise ConfigError(f"--{name} {message}; give a unit, such as 8GiB", field=name)
        if self.gpus < 0:
            raise ConfigError(f"--gpus must not be negative, got {self.gpus}", field="gpus")
        for name in ("name", "key_secret"):
            given = getattr(self, name)
            if given is not None and not re.fullmatch(_NAME, given):
                message = "must be of small letters, digits and -, begin with a letter, and have 42 characters at most"
                raise ConfigError(
                    f"--{name.replace('_', '-')} {message}, got {given!r}", field=name
                )
        if not re.fullmatch(IMAGE, self.image):
            message = f"--image must be [REGISTRY/]NAME[:TAG] in small letters, as Docker takes it, got {self.image!r}"
            raise ConfigError(message, field="image")

    @property
    def command(self) -> list[str]:
        keys = [] if self.key_secret is None else ["--api-key-file", f"{KEYS}/keys"]
        return ["serve", *self.words, "--host", "0.0.0.0", "--port", str(PORT), *keys]

    @property
    def escaped_command(self) -> list[str]:
        """The command with each `$` doubled, because Compose and Kubernetes replace `$NAME` and
        `$(NAME)`."""
        return [word.replace("$", "$$") for word in self.command]

    def allowed_hosts(self, *names: str) -> list[str]:
        """Arguments for the names under which a server without keys is reached. One with keys needs
        none."""
        return [] if self.key_secret is not None else ["--allowed-hosts", self.name, *names]

    @property
    def stop_s(self) -> int:
        return int(self.drain_s) + GRACE_S


def dockerfile(made: Deployment) -> str:
    """Makes a Dockerfile for `docker build -f FILE .` in a clone. The C++ compiler stays in the
    first stage. On a GPU's machine the image has a C compiler, which Triton needs; CUDA's libraries
    come with torch, and the driver's with NVIDIA's container toolkit."""
    extras = ",".join(sorted({*made.extras, *(["gpu"] if made.gpus else [])}))
    wheel = f"slipstream{f'[{extras}]' if extras else ''} @ file://$(ls /wheels/slipstream-*.whl)"

    def installed(packages: str) -> str:
        return f"RUN apt-get update && apt-get install -y --no-install-recommends {packages} && rm -rf /var/lib/apt/lists/*\n"

    served = ["serve", "--host", "0.0.0.0", "--port", str(PORT)]
    return (
        f"FROM {BASE} AS build\n"
        f"{installed('g++')}"
        "WORKDIR /source\n"
        "COPY pyproject.toml README.md LICENSE ./\n"
        "COPY csrc csrc\n"
        "COPY src src\n"
        "RUN pip wheel --no-cache-dir --no-deps -w /wheels .\n"
        "\n"
        f"FROM {BASE}\n"
        f"{installed('gcc libc6-dev') if made.gpus else ''}"
        "COPY --from=build /wheels /wheels\n"
        f'RUN pip install --no-cache-dir "{wheel}"\n'
        f"RUN useradd --create-home --home-dir {HOME} --uid {USER} slipstream\n"
        f"USER {USER}\n"
        f"WORKDIR {HOME}\n"
        f"VOLUME {HOME}\n"
        f"EXPOSE {PORT}\n"
        f"HEALTHCHECK --interval=10s --timeout=5s --start-period={START_S}s CMD {json.dumps(READY)}\n"
        'ENTRYPOINT ["slipstream"]\n'
        f"CMD {json.dumps(served)}\n"
    )


def compose(made: Deployment, *, build_from: str, dockerfile_name: str) -> dict[str, Any]:
    """A Compose file with one replica. `build_from`: the clone; its and the Dockerfile's path are
    relative to the file."""
    service: dict[str, Any] = {
        "image": made.image,
        "build": {"context": build_from, "dockerfile": dockerfile_name},
        "command": [*made.escaped_command, *made.allowed_hosts()],
        "ports": [f"127.0.0.1:{PORT}:{PORT}"],
        "volumes": [f"home:{HOME}"],
        "tmpfs": ["/tmp"],
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "stop_grace_period": f"{made.stop_s}s",
        "cpus": made.cpus,
        "mem_limit": made.memory,
    }
    found: dict[str, Any] = {"services": {made.name: service}, "volumes": {"home": {}}}
    if made.gpus:
        device = {"driver": "nvidia", "count": made.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    if made.gpus > 1:
        service["shm_size"] = "2gb"
    if made.key_secret is not None:
        service["secrets"] = [{"source": "keys", "target": f"{KEYS}/keys"}]
        found["secrets"] = {"keys": {"file": "./keys"}}
    return found


def kubernetes(made: Deployment) -> Iterator[dict[str, Any]]:
    """The objects: two services, the replicas, and their disruption budget."""
    labels = {"app.kubernetes.io/name": made.name}
    port = {"name": "http", "port": PORT, "targetPort": "http"}
    yield _object("v1", "Service", made.name, labels, {"selector": labels, "ports": [port]})
    # The replicas by name, to inspect a single one.
    each = {"clusterIP": "None", "publishNotReadyAddresses": True}
    yield _object(
        "v1",
        "Service",
        f"{made.name}-replicas",
        labels,
        {"selector": labels, "ports": [port], **each},
    )
    yield _object("apps/v1", "StatefulSet", made.name, labels, _replicas(made, labels))
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    yield _object("policy/v1", "PodDisruptionBudget", made.name, labels, spec)


def _object(
    version: str, kind: str, name: str, labels: dict[str, str], spec: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def _replicas(made: Deployment, labels: dict[str, str]) -> dict[str, Any]:
    volume = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": _quantity(made.volume)}},
    }
    metadata: dict[str, Any] = {"labels": labels}
    if made.key_secret is None:  # with keys a scrape needs one, too
        metadata["annotations"] = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT)}
    return {
        "serviceName": f"{made.name}-replicas",
        "replicas": made.replicas,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {"metadata": metadata, "spec": _pod(made)},
        "volumeClaimTemplates": [{"metadata": {"name": "home"}, "spec": volume}],
    }


def _pod(made: Deployment) -> dict[str, Any]:
    def probe(path: str, every: int, failures: int) -> dict[str, Any]:
        asked = {"path": path, "port": "http"}
        return {
            "httpGet": asked,
            "periodSeconds": every,
            "failureThreshold": failures,
            "timeoutSeconds": 5,
        }

    limits = {"cpu": made.cpus, "memory": _quantity(made.memory)}
    if made.gpus:
        limits["nvidia.com/gpu"] = made.gpus
    mounts: list[dict[str, Any]] = [
        {"name": "home", "mountPath": HOME},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}]
    # Ranks communicate through shared memory, of which a container has only 64 MiB.
    if made.gpus > 1:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}})
    if made.key_secret is not None:
        mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
        volumes.append(
            {"name": "keys", "secret": {"secretName": made.key_secret, "defaultMode": 0o440}}
        )
    pods = f"*.{made.name}-replicas"
    services = (f"{made.name}.$({_NAMESPACE})", pods, f"{pods}.$({_NAMESPACE})")
    hosts = made.allowed_hosts(
        *services, f"*.$({_NAMESPACE}).svc", f"*.$({_NAMESPACE}).svc.cluster.local"
    )
    field = {"fieldRef": {"fieldPath": "metadata.namespace"}}
    container = {
        "name": "serve",
        "image": made.image,
        "args": [*made.escaped_command, *hosts],
        **({"env": [{"name": _NAMESPACE, "valueFrom": field}]} if hosts else {}),
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": probe("/ready", 5, START_S // 5),
        "readinessProbe": probe("/ready", 5, 1),
        "livenessProbe": probe("/live", 10, 6),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}},
        "resources": {"requests": limits, "limits": limits},
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": LEAVE_S + made.stop_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _quantity(num_bytes: int) -> str:
    return f"{-(-num_bytes // 2**20)}Mi"


def files(made: Deployment, folder: Path, source: Path) -> dict[str, str]:
    """Text of each file in `folder`, by name. `source`: the clone that the image is built from."""
    import yaml

    clone, here = source.resolve(), folder.resolve()
    composed = compose(
        made,
        build_from=os.path.relpath(clone, here),
        dockerfile_name=os.path.relpath(here / DOCKERFILE, clone),
    )
    # Each object is copied through JSON: parts that appear in it twice, such as labels, would become YAML aliases,
    # and an edit of one would change both.
    objects = [json.loads(json.dumps(found)) for found in kubernetes(made)]
    return {
        DOCKERFILE: dockerfile(made),
        COMPOSE: yaml.safe_dump(composed, sort_keys=False, width=1000),
        KUBERNETES: yaml.safe_dump_all(objects, sort_keys=False, width=1000),
    }
