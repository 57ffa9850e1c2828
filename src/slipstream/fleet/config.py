"""`fleet.yaml`: which models are served, by which replicas, and how requests find them. Errors name the field.

    models:
      chat:                          # the name that requests ask for
        versions:
          - {name: v1, model: smollm2, share: 95, replicas: 2, engine: {num_threads: 1}}
          - {name: v2, model: smollm2, share: 5, replicas: 1, engine: {max_model_len: 2048}}

A version with replicas of several kinds has `pools`, each with what differs from the version. docs/fleet.md is the manual.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import msgspec.inspect
from msgspec import Meta, Struct

from slipstream.config import EngineArgs
from slipstream.errors import ConfigError
from slipstream.files import read_yaml
from slipstream.fleet.gateway.router import Policy
from slipstream.server.http.field_hints import allowed_values
from slipstream.server.state import ServerSettings

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,99}$")]
Share = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0, le=10_000)]


class Spec(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    pass


class ReplicaRange(Spec, frozen=True, kw_only=True):
    """Replicas: as few and as many as an autoscaler may keep. Without one there are `min`, at least one."""

    min: Count = 1
    max: Annotated[int, Meta(ge=1, le=10_000)]


class Resources(Spec, frozen=True, kw_only=True):
    """What one replica takes. CPUs are logical: Ray counts them, and nothing is bound to them."""

    cpus: Annotated[float, Meta(ge=0)] = 1.0
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    devices: tuple[
        str, ...
    ] = ()  # CUDA_VISIBLE_DEVICES of the first replica, the second, … ; empty: as they come
    custom: dict[str, float] = {}  # of Ray's: kinds of nodes


class Pool(Spec, frozen=True, kw_only=True):
    """Replicas of one kind. What is left out is the version's."""

    name: Name
    replicas: Count | ReplicaRange | None = None
    engine: dict[str, Any] = {}  # beside the version's
    resources: Resources | None = None
    weight: Annotated[float, Meta(gt=0)] | None = None


class VersionSpec(Spec, frozen=True, kw_only=True):
    name: Name
    model: str  # as `slipstream serve` takes it
    share: Share = 1.0  # of the model's requests, against its other versions
    shadow: Annotated[float, Meta(ge=0, le=1)] = (
        0.0  # this share of requests is sent here, too; the answers are dropped
    )
    replicas: Count | ReplicaRange = 1
    engine: dict[str, Any] = {}  # fields of EngineArgs
    server: dict[str, Any] = {}  # some fields of ServerSettings
    resources: Resources = Resources()
    weight: Annotated[float, Meta(gt=0)] = 1.0
    pools: tuple[Pool, ...] = ()
    prefill_tokens_per_s: Annotated[float, Meta(gt=0)] = (
        10_000.0  # what the planner expects of one replica
    )
    step_s: Seconds = 0.02


class ScalingObjectives(Spec, frozen=True, kw_only=True):
    """What an autoscaler keeps for 99 of 100 requests: seconds to the first token, and between tokens, in a request's mean."""

    ttft_s: Seconds | None = None
    itl_s: Seconds | None = None


class Autoscale(Spec, frozen=True, kw_only=True):
    """The head changes the number of replicas between their `min` and `max`. With `min: 0`, requests that come while there is
    none wait at the gateway: `max_waiting` of them, `wait_s` each."""

    objectives: ScalingObjectives | None = None  # the fleet's
    interval_s: Seconds = 10.0  # between decisions
    hold_s: Seconds = 60.0  # fewer only when fewer were enough for so long
    idle_s: Seconds = 600.0  # none after so long without requests, if `min` is 0
    cold_start_s: Seconds | None = None  # as measured
    wait_s: Seconds = 300.0
    max_waiting: Annotated[int, Meta(ge=1)] = 256
    device: str | None = (
        None  # that the replicas have, as `slipstream plan --gpu` names it; None: this machine's
    )


class Model(Spec, frozen=True, kw_only=True):
    versions: Annotated[tuple[VersionSpec, ...], Meta(min_length=1)]
    autoscale: Autoscale | None = None


class Retries(Spec, frozen=True, kw_only=True):
    share: Annotated[float, Meta(ge=0, le=1)] = (
        0.2  # of requests may be sent again, in the long run
    )
    most: Annotated[int, Meta(ge=0, le=20)] = 3  # of one request


class Hedging(Spec, frozen=True, kw_only=True):
    """A request without an answer after `after_s`, or three times the predicted TTFT if that is longer, is sent to a second
    replica; the first answer is taken."""

    after_s: Seconds
    share: Annotated[float, Meta(ge=0, le=1)] = 0.05


class Routing(Spec, frozen=True, kw_only=True):
    policy: Policy = "prefix"
    balance: Annotated[float, Meta(ge=0)] = 0.1
    thrift: Annotated[float, Meta(ge=0)] = 1.5
    retries: Retries = Retries()
    hedging: Hedging | None = None
    queue_s: Annotated[float, Meta(ge=0)] = (
        30.0  # how long a request waits at the gateway for a replica
    )
    slow_factor: Annotated[float, Meta(gt=1)] = (
        4.0  # a replica so many times slower than the others is taken out
    )
    probe_s: Annotated[float, Meta(ge=0)] = (
        30.0  # between looks whether replicas say the same; 0: none
    )
    connect_s: Seconds = 2.0
    silence_s: Seconds = (
        20.0  # of a replica, which reports its load twice a second: it hangs as a whole
    )
    first_token_s: Seconds = (
        120.0  # from when a request was sent to a replica; or three times what was predicted
    )
    next_token_s: Seconds = 120.0  # between tokens


class Tls(Spec, frozen=True, kw_only=True):
    """Mutual TLS between gateway and replicas, with these files. `auto` stands for certificates that the fleet makes itself."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


class Fleet(Spec, frozen=True, kw_only=True):
    models: Annotated[dict[Name, Model], Meta(min_length=1)]
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    backend: Literal["processes", "ray"] = "processes"
    ray_address: str | None = None  # of a cluster; left out: one on this machine
    api_key_file: str | None = None
    keys_file: str | None = (
        None  # of `slipstream keys`: roles, and limits that the gateway holds over all replicas
    )
    state_dir: str | None = None  # where keys' tokens by day are kept beyond the fleet's life
    detect: bool = False  # watch the replicas for trouble
    alert_urls: tuple[str, ...] = ()  # addresses that get findings
    allowed_hosts: tuple[str, ...] = ()  # as --allowed-hosts of `slipstream serve`
    cors_origins: tuple[str, ...] = ()  # as --cors-origin
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    grpc_port: Annotated[int, Meta(ge=0, le=65535)] | None = (
        None  # where the gateway speaks KServe's protocol over gRPC
    )
    files_dir: str | None = (
        None  # where files and batches are, beyond the fleet's life; None: there are none
    )
    max_files_bytes: Annotated[int, Meta(gt=0)] = 2**30
    max_file_bytes: Annotated[int, Meta(gt=0)] = 100 * 2**20
    batch_max_concurrent: Annotated[int, Meta(gt=0)] | None = (
        None  # lines at once; None: half of what the replicas run at once
    )
    batch_beside: Annotated[int, Meta(ge=0)] = (
        0  # of them at replicas that have requests of clients
    )
    audit_log: str | None = None  # the file
    audit_max_bytes: Annotated[int, Meta(ge=4096)] = 64 * 2**20
    audit_prompts: bool = False
    audit_failure: Literal["refuse", "serve"] = "refuse"
    log_format: Literal["text", "json"] = "text"
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 30.0
    start_timeout_s: Seconds = 600.0
    router: Routing = Routing()
    objectives: ScalingObjectives = ScalingObjectives()
    tls: Tls | Literal["auto"] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSpec:
    """Replicas of one kind, with nothing left out."""

    model: str
    version: str
    pool: str
    least: int
    most: int
    args: EngineArgs
    server: dict[str, Any]
    resources: Resources
    weight: float
    prefill_tokens_per_s: float
    step_s: float

    @property
    def key(self) -> str:
        return f"{self.model}/{self.version}/{self.pool}"

    @property
    def is_scaled(self) -> bool:
        """With `autoscale` it is."""
        return self.least < self.most

    @property
    def adapters(self) -> frozenset[str]:
        """The names of those that its replicas have."""
        return frozenset(self.args.lora_modules or ())

    @property
    def fingerprint(self) -> str:
        """Of what a replica is started with: another one needs other replicas."""
        return hashlib.blake2b(
            repr((self.args, self.server, self.resources)).encode(), digest_size=8
        ).hexdigest()


_OF_FLEET = {  # fields of ServerSettings that the fleet itself sets
    *("host", "port", "served_model_names", "api_keys", "fleet_key", "shared_dir"),
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
}

_NOT_IN_FLEET = {
    "keys_file": "the gateway lets clients in, by the fleet's own api_key_file and keys_file",
    "files_dir": "files and batches are the gateway's, by the fleet's own files_dir",
    "grpc_port": "the gateway speaks gRPC, by the fleet's own grpc_port",
    "allowed_hosts": "clients reach the gateway, which has the fleet's own allowed_hosts",
    "cors_origins": "clients reach the gateway, which has the fleet's own cors_origins",
    "audit_log": "the gateway writes the audit log, by the fleet's own audit_log",
    "lora_folder": "adapters of a fleet stand in engine.lora_modules",
    "enable_sleep_mode": "replicas of a fleet do not sleep; autoscale with min: 0 ends those that nobody needs",
}


_OF_GATEWAY = (
    *("host", "port", "keys_file", "state_dir", "ssl_certfile", "ssl_keyfile", "grpc_port"),
    *("allowed_hosts", "cors_origins"),
    *(
        "files_dir",
        "max_files_bytes",
        "max_file_bytes",
        "audit_log",
        "audit_max_bytes",
        "audit_prompts",
        "audit_failure",
    ),
)
"""Fields that are the gateway's ServerSettings, and that a rollout can't change."""

FIXED = (*_OF_GATEWAY, "api_key_file", "backend", "ray_address", "tls", "detect", "alert_urls")
"""Fields that a rollout can't change."""

_PATHS = (
    "api_key_file",
    "keys_file",
    "state_dir",
    "ssl_certfile",
    "ssl_keyfile",
    "files_dir",
    "audit_log",
)


def read(path: str | Path) -> Fleet:
    """ConfigError names the field. Relative paths in the file are below its folder: what runs from there, also a head that
    comes back, need not."""
    try:
        data = read_yaml(Path(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="fleet.yaml") from None
    except ValueError as error:
        raise ConfigError(f"cannot read {path}: {error}", field="fleet.yaml") from None
    return _placed(check(data), Path(path).resolve().parent)


def _placed(fleet: Fleet, folder: Path) -> Fleet:
    def at(path: str, field: str) -> str:
        try:
            return str(folder / Path(path).expanduser())
        except RuntimeError:
            raise ConfigError(
                f"{field}: the home folder of {path} is not known; write the whole path",
                field=field,
            ) from None

    def model(
        name: str, field: str = "model"
    ) -> str:  # a name that only looks like a path is one of a hub
        return at(name, field) if name.startswith(("./", "../", "~")) else name

    def placed(version: VersionSpec) -> VersionSpec:
        def engine(given: dict[str, Any]) -> dict[str, Any]:
            adapters = given.get("lora_modules")
            if not isinstance(adapters, dict):
                return given
            return {
                **given,
                "lora_modules": {
                    name: model(str(path), "lora_modules") for name, path in adapters.items()
                },
            }

        own = tuple(replace(pool, engine=engine(pool.engine)) for pool in version.pools)
        return replace(
            version, model=model(version.model), engine=engine(version.engine), pools=own
        )

    replace = msgspec.structs.replace
    models = {
        name: replace(m, versions=tuple(map(placed, m.versions)))
        for name, m in fleet.models.items()
    }
    given: dict[str, Any] = {
        name: at(path, name) for name in _PATHS if (path := getattr(fleet, name)) is not None
    }
    if isinstance(tls := fleet.tls, Tls) and tls.ca and tls.certificate and tls.key:
        files = {"ca": tls.ca, "certificate": tls.certificate, "key": tls.key}
        given["tls"] = Tls(**{name: at(path, f"tls.{name}") for name, path in files.items()})
    return replace(fleet, models=models, **given)


def gateway_settings(fleet: Fleet, api_keys: tuple[str, ...] = ()) -> ServerSettings:
    """ConfigError names the field."""
    own = {name: getattr(fleet, name) for name in (*_OF_GATEWAY, "drain_timeout_s", "log_format")}
    return ServerSettings(served_model_names=tuple(fleet.models), api_keys=api_keys, **own)


def check(data: object) -> Fleet:
    try:
        fleet = msgspec.convert(data, Fleet, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at ")
        if where.startswith("`key`"):
            where, message = where.removeprefix("`key` in "), _NAMES
        field = where.strip("`").removeprefix("$").removeprefix(".") or "fleet.yaml"
        message = _plain(message, field)
        if field.startswith("models[...]") and isinstance(data, dict):
            field = f"models.{_wrong_model(data['models'])}{field.removeprefix('models[...]')}"
        raise ConfigError(f"{field}: {message}", field=field) from None
    gateway_settings(fleet)
    if fleet.alert_urls and not fleet.detect:
        raise ConfigError("alert_urls has an effect only with detect: true", field="alert_urls")
    for field in ("batch_max_concurrent", "batch_beside"):
        if fleet.files_dir is None and getattr(fleet, field):
            raise ConfigError(
                f"{field} has an effect only with files_dir; set that, or leave it out", field=field
            )
    for name, model in fleet.models.items():
        where = f"models.{name}.versions"
        _unique((version.name for version in model.versions), where)
        if not any(version.share for version in model.versions):
            raise ConfigError(f"{where}: every share is 0, so nobody would answer", field=where)
    if fleet.backend == "processes" and fleet.ray_address is not None:
        raise ConfigError("ray_address has an effect only with backend: ray", field="ray_address")
    if isinstance(fleet.tls, Tls) and not (
        fleet.tls.ca and fleet.tls.certificate and fleet.tls.key
    ):
        raise ConfigError("tls: give ca, certificate and key, or auto", field="tls")
    found = pools(fleet)
    _check_adapters(fleet, found)
    for name in fleet.models:
        _check_autoscale(fleet, name, [spec for spec in found if spec.model == name])
    return fleet


_NAMES = "a name has letters, digits and . _ - / :, and begins with a letter or a digit"
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


def _wrong_model(models: dict[Any, object]) -> Any:
    """The name of the first that is not right. There is one."""
    for name, model in models.items():
        try:
            msgspec.convert(model, Model, str_keys=True)
        except msgspec.ValidationError:
            return name
    raise AssertionError


def _plain(message: str, where: str) -> str:
    """What msgspec says, with the values of an enumeration, and what an unknown field at `where` may have been meant to be."""
    if message.startswith("Invalid enum value"):
        return message + allowed_values(Fleet, where)
    if (found := _UNKNOWN.fullmatch(message)) is None:
        return (
            "the file is empty"
            if where == "fleet.yaml" and message.endswith("got `null`")
            else message
        )
    known, told = _fields(), f"there is no field {found[1]!r}"
    here = re.sub(r"\[[^]]*\]", "[]", where).removeprefix("fleet.yaml")
    if near := difflib.get_close_matches(
        found[1].lower(), [name for place, name in known if place == here], n=1
    ):
        return f"{told}; did you mean {near[0]!r}?"
    if others := [place for place, name in known if name == found[1] and place != here]:
        return f"{told} here; it stands in {' or '.join(others[:3])}"
    return f"{told}; there are {', '.join(name for place, name in known if place == here)}"


def _fields() -> list[tuple[str, str]]:
    """(place, name) of each field that a file may have; a place is such as models[].versions[]."""
    found: list[tuple[str, str]] = []

    def walk(kind: Any, place: str) -> None:
        match kind:
            case msgspec.inspect.StructType():
                for field in kind.fields:
                    found.append((place, field.encode_name))
                    walk(field.type, f"{place}.{field.encode_name}".removeprefix("."))
            case msgspec.inspect.DictType():
                walk(kind.value_type, f"{place}[]")
            case msgspec.inspect.VarTupleType():
                walk(kind.item_type, f"{place}[]")
            case msgspec.inspect.UnionType():
                for one in kind.types:
                    walk(one, place)

    walk(msgspec.inspect.type_info(Fleet), "")
    return found


def pools(fleet: Fleet) -> list[PoolSpec]:
    """All of the fleet's, in order."""
    found = []
    for name, model in fleet.models.items():
        for i, version in enumerate(model.versions):
            where = f"models.{name}.versions[{i}]"
            given = version.pools or (Pool(name="main"),)
            _unique((pool.name for pool in given), f"{where}.pools")
            for pool in given:
                found.append(_pool(name, version, pool, where))
    return found


def _pool(model: str, version: VersionSpec, pool: Pool, where: str) -> PoolSpec:
    replicas = version.replicas if pool.replicas is None else pool.replicas
    least, most = (
        (replicas.min, replicas.max) if isinstance(replicas, ReplicaRange) else (replicas, replicas)
    )
    if least > most:
        raise ConfigError(
            f"{where}.replicas: min {least} is above max {most}", field=f"{where}.replicas"
        )
    settings = {**version.engine, **pool.engine}
    for name in ("model", "download_dir"):
        if name == "model" and name in settings:
            raise ConfigError(
                f"{where}.engine.model: the version's own field says it",
                field=f"{where}.engine.model",
            )
    try:
        args = EngineArgs(model=version.model, **settings)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{where}.engine: {error}", field=f"{where}.engine") from None
    if taken := sorted(_OF_FLEET & version.server.keys()):
        raise ConfigError(
            f"{where}.server.{taken[0]}: the fleet sets it", field=f"{where}.server.{taken[0]}"
        )
    if wrong := sorted(_NOT_IN_FLEET.keys() & version.server.keys()):
        message = f"{where}.server.{wrong[0]}: leave it out; {_NOT_IN_FLEET[wrong[0]]}"
        raise ConfigError(message, field=f"{where}.server.{wrong[0]}")
    try:
        ServerSettings(**version.server)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{where}.server: {error}", field=f"{where}.server") from None
    return PoolSpec(
        model=model,
        version=version.name,
        pool=pool.name,
        least=least,
        most=most,
        args=args,
        server=version.server,
        resources=pool.resources or version.resources,
        weight=pool.weight or version.weight,
        prefill_tokens_per_s=version.prefill_tokens_per_s,
        step_s=version.step_s,
    )


def _check_adapters(fleet: Fleet, found: list[PoolSpec]) -> None:
    """A name is one model's, or one model's adapter."""
    of: dict[str, str] = {}
    for spec in found:
        for name in spec.adapters:
            where = f"models.{spec.model}: engine.lora_modules"
            if name in fleet.models:
                raise ConfigError(
                    f"{where}: {name!r} is a model's name; take another", field="lora_modules"
                )
            if of.setdefault(name, spec.model) != spec.model:
                message = f"{where}: {name!r} is an adapter of {of[name]}, too; take another name"
                raise ConfigError(message, field="lora_modules")


def _check_autoscale(fleet: Fleet, name: str, own: list[PoolSpec]) -> None:
    where, settings = f"models.{name}.autoscale", fleet.models[name].autoscale
    if settings is None:
        return
    versions = fleet.models[name].versions
    for i, version in enumerate(versions):
        kinds = [spec for spec in own if spec.version == version.name]
        scaled = [spec for spec in kinds if spec.is_scaled]
        field = f"models.{name}.versions[{i}]"
        if scaled and len(kinds) > 1:
            field += ".pools"
            message = f"{field}: which of {len(kinds)} kinds of replicas to start is not planned; give each a fixed number"
            raise ConfigError(message, field=field)
        for spec in scaled:
            _check_scaled(spec, version.share, field, where, is_alone=len(versions) == 1)
    if not any(spec.is_scaled for spec in own):
        field = f"models.{name}.versions[0].replicas"
        raise ConfigError(f"{field}: autoscale needs {{min, max}} that differ", field=field)
    if (
        fleet.ray_address is not None
        and settings.device is None
        and any(s.is_scaled and s.resources.gpus for s in own)
    ):
        field = f"{where}.device"
        raise ConfigError(
            f"{field}: name the GPU of the cluster's replicas, as for `slipstream plan --gpu`",
            field=field,
        )
    objectives = settings.objectives or fleet.objectives
    if objectives.ttft_s is None and objectives.itl_s is None:
        raise ConfigError(
            f"{where}.objectives: give ttft_s, itl_s or both, here or for the fleet",
            field=f"{where}.objectives",
        )


def _check_scaled(spec: PoolSpec, share: float, field: str, where: str, *, is_alone: bool) -> None:
    """`field` is the version's, `where` its model's `autoscale`."""
    for setting in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        if getattr(spec.args, setting) > 1:
            message = f"{where}: replicas over several devices are not planned, so leave {setting} at 1, or autoscale out"
            raise ConfigError(message, field=where)
    field += ".replicas"
    if share == 0:
        message = f"{field}: a version without a share has no load to be scaled by; give it a fixed number"
        raise ConfigError(message, field=field)
    if spec.least == 0 and not is_alone:
        message = f"{field}: min 0 is for a model's only version; requests of one that has no replica go to the others"
        raise ConfigError(message, field=field)


def _unique(names: Any, where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{where}: {name!r} is there twice", field=where)
        seen.add(name)
