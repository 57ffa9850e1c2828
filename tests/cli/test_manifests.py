"""`slipstream manifests`: what is written is valid, and starts the server with words that it takes."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from slipstream.cli.main import ArgumentParser, main
from slipstream.cli.serving.serve import server_settings
from slipstream.server.http.auth import OPEN_ROUTES
from slipstream.server.http.web_guard import WebGuard
from slipstream.server.operations.manifests import PORT, READY, Deployment

CLONE = Path(__file__).parents[2]
SERVE = "smollm2 --max-model-len 4096 --drain-timeout 60 --tool-call-parser 'none'"


def write(folder, *more, serve=SERVE):
    assert main(["manifests", str(folder), "--source", str(CLONE), "--serve", serve, *more]) == 0
    objects = list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text()))
    return (
        (folder / "Dockerfile").read_text(),
        yaml.safe_load((folder / "compose.yaml").read_text()),
        objects,
    )


def replicas_of(objects):
    (found,) = (x for x in objects if x["kind"] == "StatefulSet")
    return found["spec"], found["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "more", [(), ("--gpus", "2", "--key-secret", "llm-keys", "--replicas", "3", "--name", "chat-1")]
)
def test_kubernetes_takes_them(tmp_path, more):
    _, _, objects = write(tmp_path, *more)
    assert [x["kind"] for x in objects] == [
        "Service",
        "Service",
        "StatefulSet",
        "PodDisruptionBudget",
    ]
    for found in objects:
        kubernetes_validate.validate(found, "1.31", strict=True)
    selectors = [x["spec"]["selector"].get("matchLabels", x["spec"]["selector"]) for x in objects]
    spec, _ = replicas_of(objects)
    assert spec["replicas"] == (3 if more else 1)
    assert all(s == spec["template"]["metadata"]["labels"] for s in selectors)
    assert spec["serviceName"] in [x["metadata"]["name"] for x in objects if x["kind"] == "Service"]


def test_all_start_the_same_server(tmp_path):
    _, composed, objects = write(tmp_path, "--key-secret", "llm-keys")
    spec, pod = replicas_of(objects)
    words = pod["containers"][0]["args"]
    assert words == composed["services"]["slipstream"]["command"]
    assert words[0] == "serve"
    parsed = ArgumentParser(prog="slipstream serve", module="serving.serve").parse_args(words[1:])
    assert (parsed.model, parsed.max_model_len, parsed.tool_call_parser) == (
        "smollm2",
        4096,
        "none",
    )
    assert (parsed.host, parsed.port) == ("0.0.0.0", PORT)
    mounted = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    assert mounted[str(Path(parsed.api_key_file).parent)] == "keys"
    assert composed["services"]["slipstream"]["secrets"][0]["target"] == parsed.api_key_file
    assert (
        "annotations" not in spec["template"]["metadata"]
    )  # a scrape without a key would be refused


def test_words_reach_the_server_as_they_are(tmp_path):
    """Compose puts variables in the place of `$NAME`, Kubernetes in that of `$(NAME)`; to both `$$` is a `$`."""
    _, composed, objects = write(tmp_path, serve="smollm2 --served-model-name 'a$HOME$(PATH)$'")
    assert composed["services"]["slipstream"]["command"][3] == "a$$HOME$$(PATH)$$"
    assert replicas_of(objects)[1]["containers"][0]["args"][3] == "a$$HOME$$(PATH)$$"


def test_without_keys_a_server_is_reached_by_the_names_of_its_services(tmp_path):
    _, composed, objects = write(
        tmp_path, "--name", "chat", serve="smollm2 --allowed-hosts llm.example"
    )
    container = replicas_of(objects)[1]["containers"][0]
    assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    words = [word.replace("$(POD_NAMESPACE)", "prod") for word in container["args"]]

    def is_allowed(words, host):
        parsed = ArgumentParser(prog="slipstream serve", module="serving.serve").parse_args(
            words[1:]
        )
        return WebGuard(None, server_settings(parsed), has_keys=False).is_allowed(host)

    names = ("chat", "chat.prod", "chat.prod.svc", "chat.prod.svc.cluster.local", "llm.example")
    pods = (f"chat-0.chat-replicas{more}" for more in ("", ".prod", ".prod.svc.cluster.local"))
    for host in (*names, *pods, "10.1.2.3"):
        assert is_allowed(words, f"{host}:8000"), host
    assert not is_allowed(words, "chat.evil.example")
    words = composed["services"]["chat"]["command"]
    assert is_allowed(words, "chat:8000")
    assert not is_allowed(words, "chat.evil.example")


def test_probes_need_no_key(tmp_path):
    _, _, objects = write(tmp_path)
    container = replicas_of(objects)[1]["containers"][0]
    paths = {
        container[f"{kind}Probe"]["httpGet"]["path"]
        for kind in ("startup", "readiness", "liveness")
    }
    assert paths == {"/ready", "/live"} <= OPEN_ROUTES
    assert f":{PORT}/ready" in READY[-1]


def test_the_image_has_what_it_copies(tmp_path):
    docker, composed, _ = write(tmp_path / "deploy", "--extra", "vision", "--extra", "otel")
    copied = [
        line.split()[1:-1]
        for line in docker.splitlines()
        if line.startswith("COPY ") and "--from" not in line
    ]
    sources = [name for names in copied for name in names]
    assert sources
    assert all((CLONE / name).exists() for name in sources)
    extras = tomllib.loads((CLONE / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert "slipstream[otel,vision] @" in docker
    assert {"otel", "vision", "gpu"} <= set(extras)
    build = composed["services"]["slipstream"]["build"]
    context = tmp_path / "deploy" / build["context"]
    assert context.resolve() == CLONE
    assert (context / build["dockerfile"]).resolve() == (
        tmp_path / "deploy" / "Dockerfile"
    ).resolve()


def test_the_image_has_what_the_servers_options_need(tmp_path):
    docker, _, _ = write(
        tmp_path,
        "--image",
        "registry.example:5000/a/b_c:1.0",
        serve="smollm2 --detect --otlp-endpoint http://c:4318",
    )
    assert "slipstream[detect,otel] @" in docker
    write(
        tmp_path,
        serve="smollm2 --files-dir files --state-dir /home/slipstream/state --audit-log /tmp/log",
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--serve", "smollm2 --max-modl-len 1"), "did you mean --max-model-len"),
        (("--serve", "smollm2 --port 80"), "publish it as another"),
        (("--serve", "smollm2 --port 0"), "publish it as another"),
        (("--serve", "smollm2 --api-key secret"), "--key-secret"),
        (("--serve", "./my-model"), "a path of this machine"),
        (("--serve", "tests"), "a path of this machine"),
        (("--serve", "'smollm2"), "No closing quotation"),
        (("--replicas", "0"), "--replicas must be at least 1"),
        (("--gpus", "-1"), "must not be negative"),
        (("--name", "Chat"), "small letters"),
        (("--name", "chat.org"), "small letters"),
        (
            ("--source", "/"),
            "not a clone of Slipstream: it has no pyproject.toml; give the clone's folder",
        ),
        (("--extra", "cuda"), "no extra"),
        (("--image", "My Image"), "[REGISTRY/]NAME[:TAG]"),
        (("--image", "a:b:c"), "[REGISTRY/]NAME[:TAG]"),
        (("--memory", "8"), "give a unit"),
        (("--volume", "0"), "give a unit"),
        (("--serve", "smollm2 --ssl-certfile /c.pem"), "end TLS before the service"),
        (("--serve", "smollm2 --files-dir /files"), "only write below /home/slipstream"),
        (("--serve", "smollm2 --drain-timeout inf"), "a finite number of seconds"),
        (("--serve", "smollm2 --drain-timeout nan"), "drain_timeout_s must be 0 or more"),
        (("--serve", "smollm2 --max-body-bytes 0"), "max_body_bytes must be above 0"),
        (("--serve", "smollm2 --dtype half"), "did you mean 'float16'"),
        (("--serve", "smollm2 --alert-url http://a"), "only with --detect"),
        (("--serve", "smollm2 --device cuda"), "--gpus is 0"),
        (("--serve", "smollm2 --device cpu", "--gpus", "1"), "--gpus is 1"),
        (("--serve", "smollm2 --tensor-parallel-size 2", "--gpus", "1"), "give --gpus 2"),
    ],
)
def test_what_is_refused(tmp_path, capsys, monkeypatch, more, says):
    monkeypatch.chdir(CLONE)
    assert main(["manifests", str(tmp_path / "made"), "--source", str(CLONE), *more]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_json_has_the_files_and_the_command(tmp_path, capsys):
    capsys.readouterr()
    write(tmp_path / "a folder", "--json")
    told = json.loads(capsys.readouterr().out)
    assert [Path(f).name for f in told["files"]] == [
        "Dockerfile",
        "compose.yaml",
        "kubernetes.yaml",
    ]
    assert told["command"][:2] == ["slipstream", "serve"]
    assert shlex.split(SERVE)[0] in told["command"]


def test_help_names_the_deployments_defaults():
    parser = ArgumentParser(prog="slipstream manifests", module="serving.manifests")
    parser._complete()
    help_of = {a.dest: a.help for a in parser._actions}
    made = Deployment(words=(), drain_s=0)
    for name in ("replicas", "cpus", "gpus"):
        assert f"(default: {getattr(made, name)})" in help_of[name]
    for name in ("memory", "volume"):
        assert f"(default: {getattr(made, name) // 2**30}GiB)" in help_of[name]
