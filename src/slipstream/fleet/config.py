"""Settings of a fleet (`fleet.yaml`): the models, their replicas, and how requests are routed.
Errors name the field.

    models:
      chat:                          # the name that requests ask for
        versions:
          - {name: v1, model: smollm2, share: 95, replicas: 2, engine: {num_threads: 1}}
          - {name: v2, model: smollm2, share: 5, replicas: 1, engine: {max_model_len: 2048}}

A version with replicas of several kinds has `pools`; each pool holds what differs from the version.
docs/fleet.md is the manual."""

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

from slipstream.base.files import read_yaml
from slipstream.config import EngineArgs
from slipstream.config.settings import PARALLEL_SIZES
from slipstream.errors import ConfigError
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
    """Bounds for the number of replicas. Without an autoscaler the pool has `min`, and at least
    one."""

    min: Count = 1
    max: Annotated[int, Meta(ge=1, le=10_000)]


class Resources(Spec, frozen=True, kw_only=True):
    """Resources of one replica. CPUs are logical: Ray counts them, but processes are not pinned to them."""

    cpus: Annotated[float, Meta(ge=0)] = 1.0
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    # CUDA_VISIBLE_DEVICES of the first replica, the second, …; empty: not set
    devices: tuple[str, ...] = ()
    custom: dict[str, float] = {}  # custom Ray resources, which select kinds of nodes


Role = Literal["mixed", "prefill", "decode"]


class Pool(Spec, frozen=True, kw_only=True):
    """Replicas of one kind. Missing fields take the version's values."""

    name: Name
    # which parts of requests they compute: prompts for others, answers, or (mixed) whichever costs least
    role: Role = "mixed"
    replicas: Count | ReplicaRange | None = None
    engine: dict[str, Any] = {}  # added to the version's
    resources: Resources | None = None
    weight: Annotated[float, Meta(gt=0)] | None = None


class VersionSpec(Spec, frozen=True, kw_only=True):
    name: Name
    model: str  # in any form that `slipstream serve` takes
    share: Share = 1.0  # weight among the model's versions when a request chooses one
    # fraction of requests also sent here; the answers are dropped
    shadow: Annotated[float, Meta(ge=0, le=1)] = 0.0
    replicas: Count | ReplicaRange = 1
    engine: dict[str, Any] = {}  # fields of EngineArgs
    server: dict[str, Any] = {}  # some fields of ServerSettings
    resources: Resources = Resources()
    weight: Annotated[float, Meta(gt=0)] = 1.0
    pools: tuple[Pool, ...] = ()
    # the planner's estimate for one replica
    prefill_tokens_per_s: Annotated[float, Meta(gt=0)] = 10_000.0
    step_s: Seconds = 0.02


class ScalingObjectives(Spec, frozen=True, kw_only=True):
    """Latency objectives that an autoscaler meets for 99 of 100 requests: seconds to the first
    token, and a request's mean seconds between tokens."""

    ttft_s: Seconds | None = None
    itl_s: Seconds | None = None


class Autoscale(Spec, frozen=True, kw_only=True):
    """Autoscaling between `min` and `max` replicas. With `min: 0`, requests that arrive while there
    is no replica wait at the gateway: up to `max_waiting` of them, up to `wait_s` each."""

    objectives: ScalingObjectives | None = None  # default: the fleet's
    interval_s: Seconds = 10.0  # between decisions
    hold_s: Seconds = 60.0  # scale down only when fewer were enough for this long
    idle_s: Seconds = 600.0  # with `min: 0`: no replica after this long without requests
    cold_start_s: Seconds | None = None  # default: as measured
    wait_s: Seconds = 300.0
    max_waiting: Annotated[int, Meta(ge=1)] = 256
    # the replicas' GPU, as `slipstream plan --gpu` names it; None: this machine's
    device: str | None = None


class Model(Spec, frozen=True, kw_only=True):
    versions: Annotated[tuple[VersionSpec, ...], Meta(min_length=1)]
    autoscale: Autoscale | None = None


class Retries(Spec, frozen=True, kw_only=True):
    # retries as a fraction of requests, in the long run
    share: Annotated[float, Meta(ge=0, le=1)] = 0.2
    most: Annotated[int, Meta(ge=0, le=20)] = 3  # retries of one request


class Hedging(Spec, frozen=True, kw_only=True):
    """Hedging: a request without an answer after `after_s`, or after three times the predicted TTFT
    if that is longer, is also sent to a second replica. The first answer wins."""

    after_s: Seconds
    share: Annotated[float, Meta(ge=0, le=1)] = 0.05


PATIENCE_SHARE = 1 / 3
"""Fraction of the TTFT objective that a router may spend on cache hits."""


class Routing(Spec, frozen=True, kw_only=True):
    policy: Policy = "prefix"
    balance: Annotated[float, Meta(ge=0)] = 0.1
    thrift: Annotated[float, Meta(ge=0)] = 1.5
    # predicted TTFT that a router may spend on cache hits; default: a third of `objectives.ttft_s`
    patience_s: Seconds | None = None
    retries: Retries = Retries()
    hedging: Hedging | None = None
    # how long a request waits at the gateway for a replica
    queue_s: Annotated[float, Meta(ge=0)] = 30.0
    # a replica this many times slower than the others gets no requests
    slow_factor: Annotated[float, Meta(gt=1)] = 4.0
    # time between checks that replicas give the same answer; 0: no checks
    probe_s: Annotated[float, Meta(ge=0)] = 30.0
    connect_s: Seconds = 2.0
    # a replica without reports for this long hangs (it reports its load twice a second)
    silence_s: Seconds = 20.0
    # limit since the request was sent to a replica, or three times the predicted TTFT if longer
    first_token_s: Seconds = 120.0
    next_token_s: Seconds = 120.0  # limit between tokens
    # with roles: which prompts a prefill replica computes: all, or those where it costs clients less
    handover: Literal["cost", "always"] = "cost"


CACHE_SHARE = 8
"""Default limit of the KV cache of a model with `min: 0`: 1/8 of `models_memory`, as in a server of several models."""


class Tls(Spec, frozen=True, kw_only=True):
    """Files for mutual TLS between gateway and replicas. The alternative `auto` means certificates
    that the fleet makes itself."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


class Fleet(Spec, frozen=True, kw_only=True):
    models: Annotated[dict[Name, Model], Meta(min_length=1)]
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    backend: Literal["processes", "ray"] = "processes"
    ray_address: str | None = None  # address of a cluster; default: start Ray on this machine
    api_key_file: str | None = None
    # file of `slipstream keys`: roles, and limits that the gateway enforces over all replicas
    keys_file: str | None = None
    state_dir: str | None = None  # keeps keys' token counts by day after the fleet has ended
    detect: bool = False  # run the fault detector on the replicas
    alert_urls: tuple[str, ...] = ()  # addresses that receive findings
    allowed_hosts: tuple[str, ...] = ()  # as --allowed-hosts of `slipstream serve`
    cors_origins: tuple[str, ...] = ()  # as --cors-origin
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    # port for KServe's gRPC protocol
    grpc_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    # keeps files and batches after the fleet has ended; None: both are off
    files_dir: str | None = None
    max_files_bytes: Annotated[int, Meta(gt=0)] = 2**30
    max_file_bytes: Annotated[int, Meta(gt=0)] = 100 * 2**20
    # batch lines at a time; None: half of what the replicas run at a time
    batch_max_concurrent: Annotated[int, Meta(gt=0)] | None = None
    # batch lines on each replica that also has requests of clients
    batch_beside: Annotated[int, Meta(ge=0)] = 0
    audit_log: str | None = None  # path of the file
    audit_max_bytes: Annotated[int, Meta(ge=4096)] = 64 * 2**20
    audit_prompts: bool = False
    audit_failure: Literal["refuse", "serve"] = "refuse"
    log_format: Literal["text", "json"] = "text"
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 30.0
    start_timeout_s: Seconds = 600.0
    router: Routing = Routing()
    objectives: ScalingObjectives = ScalingObjectives()
    # memory of all replicas together, on one machine; models with `min: 0` share it
    models_memory: Annotated[int, Meta(gt=0)] | None = None
    tls: Tls | Literal["auto"] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSpec:
    """Settings of one pool, with every default filled in."""

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
    role: Role = "mixed"

    @property
    def key(self) -> str:
        return f"{self.model}/{self.version}/{self.pool}"

    @property
    def is_scaled(self) -> bool:
        """Whether an autoscaler may change the number of replicas."""
        return self.least < self.most

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters that the pool's replicas load."""
        return frozenset(self.args.lora_modules or ())

    @property
    def fingerprint(self) -> str:
        """Hash of the settings that a replica is started with. When it changes, the replicas are
        replaced."""
        return hashlib.blake2b(
            repr((self.args, self.server, self.resources)).encode(), digest_size=8
        ).hexdigest()


_OF_FLEET = {  # fields of ServerSettings that the fleet sets itself
    *("host", "port", "served_model_names", "api_keys", "fleet_key", "shared_dir"),
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
}

_NOT_IN_FLEET = {
    "enable_return_routed_experts": "an answer of LLM(...) has its experts, and no route returns them",
    "keys_file": "the gateway lets clients in, by the fleet's own api_key_file and keys_file",
    "files_dir": "files and batches are the gateway's, by the fleet's own files_dir",
    "grpc_port": "the gateway speaks gRPC, by the fleet's own grpc_port",
    "allowed_hosts": "clients reach the gateway, which has the fleet's own allowed_hosts",
    "cors_origins": "clients reach the gateway, which has the fleet's own cors_origins",
    "audit_log": "the gateway writes the audit log, by the fleet's own audit_log",
    "lora_folder": "adapters of a fleet stand in engine.lora_modules",
    "kv_events_config": "the gateway follows the caches itself, and replicas would publish at one address",
    "enable_weight_updates": "a gateway changes no replica's weights; start them apart from a fleet",
    "weights_folder": "a gateway changes no replica's weights; start them apart from a fleet",
    "kv_handover_address": "the fleet gives each replica its own, where pools have roles",
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
"""Fields passed on to the gateway's ServerSettings."""

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
    """Read and check a fleet file. ConfigError names the field. Relative paths in the file are
    relative to its folder, so that a head may run, or restart, from another folder."""
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

    # a name that only looks like a path belongs to a hub
    def model(name: str, field: str = "model") -> str:
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
    """The gateway's ServerSettings. ConfigError names the field."""
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
            raise ConfigError(f"{where}: every share is 0, so no version would answer", field=where)
    if fleet.backend == "processes" and fleet.ray_address is not None:
        raise ConfigError("ray_address has an effect only with backend: ray", field="ray_address")
    if isinstance(fleet.tls, Tls) and not (
        fleet.tls.ca and fleet.tls.certificate and fleet.tls.key
    ):
        raise ConfigError("tls: give ca, certificate and key, or auto", field="tls")
    if fleet.models_memory is not None and fleet.backend == "ray":
        raise ConfigError(
            "models_memory is of this machine: it needs backend: processes", field="models_memory"
        )
    if fleet.router.patience_s is None and fleet.objectives.ttft_s is not None:
        patient = msgspec.structs.replace(
            fleet.router, patience_s=PATIENCE_SHARE * fleet.objectives.ttft_s
        )
        fleet = msgspec.structs.replace(fleet, router=patient)
    found = pools(fleet)
    if fleet.models_memory is not None and not any(
        spec.least == 0 and fleet.models[spec.model].autoscale is not None for spec in found
    ):
        raise ConfigError(
            "models_memory has an effect only on models with autoscale and replicas: {min: 0, max: N}",
            field="models_memory",
        )
    _check_adapters(fleet, found)
    _check_roles(fleet, found)
    for name in fleet.models:
        _check_autoscale(fleet, name, [spec for spec in found if spec.model == name])
    return fleet


_NAMES = "a name has letters, digits and . _ - / :, and begins with a letter or a digit"
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


def _wrong_model(models: dict[Any, object]) -> Any:
    """Name of the first invalid model. The caller knows that there is one."""
    for name, model in models.items():
        try:
            msgspec.convert(model, Model, str_keys=True)
        except msgspec.ValidationError:
            return name
    raise AssertionError


def _plain(message: str, where: str) -> str:
    """msgspec's message, plus the values of an enumeration, or the nearest valid name for an
    unknown field at `where`."""
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
    """(path, name) of each field that a file may have. A path is, for example,
    models[].versions[]."""
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
    """All pools of the fleet, in the file's order."""
    found = []
    for name, model in fleet.models.items():
        for i, version in enumerate(model.versions):
            where = f"models.{name}.versions[{i}]"
            given = version.pools or (Pool(name="main"),)
            _unique((pool.name for pool in given), f"{where}.pools")
            for pool in given:
                found.append(_pool(name, version, pool, where, fleet.models_memory))
    return found


def _pool(
    model: str, version: VersionSpec, pool: Pool, where: str, models_memory: int | None
) -> PoolSpec:
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
                f"{where}.engine.model: leave it out; the version's field model has it",
                field=f"{where}.engine.model",
            )
    own = {}
    if any(p.role != "mixed" for p in version.pools):
        own["kv_handover_address"] = IN_FLEET
    if models_memory is not None and least == 0:
        settings.setdefault("kv_cache_bytes", models_memory // CACHE_SHARE)
    try:
        args = EngineArgs(model=version.model, **{**settings, **own})
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{where}.engine: {error}", field=f"{where}.engine") from None
    if taken := sorted(_OF_FLEET & version.server.keys()):
        raise ConfigError(
            f"{where}.server.{taken[0]}: leave it out; the fleet sets it",
            field=f"{where}.server.{taken[0]}",
        )
    for part, given in (("engine", settings), ("server", version.server)):
        if wrong := sorted(_NOT_IN_FLEET.keys() & given.keys()):
            message = f"{where}.{part}.{wrong[0]}: leave it out; {_NOT_IN_FLEET[wrong[0]]}"
            raise ConfigError(message, field=f"{where}.{part}.{wrong[0]}")
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
        role=pool.role,
    )


IN_FLEET = "unix:fleet"
"""Placeholder for the address that each replica gets when it is started."""

_OF_BLOCKS = (
    *("dtype", "quantization", "kv_cache_dtype", "block_size", "load_format", "seed", "kernels"),
    *("speculative_model", "speculative_config", "enable_lora", "lora_modules"),
    *PARALLEL_SIZES,
    "max_model_len",  # LongRoPE's factors follow it
)
"""Settings on which the contents of cache blocks depend: pools that hand over to each other must have the same."""


def _check_roles(fleet: Fleet, found: list[PoolSpec]) -> None:
    """Check that pools with roles complement each other, and that their blocks are compatible."""
    by_version: dict[tuple[str, str], list[PoolSpec]] = {}
    for spec in found:
        by_version.setdefault((spec.model, spec.version), []).append(spec)
    for (model, version), own in by_version.items():
        roles = {spec.role for spec in own}
        if roles == {"mixed"}:
            continue
        field = f"models.{model}.versions.{version}.pools"
        for role in ("prefill", "decode"):
            if not roles & {role, "mixed"}:
                raise ConfigError(
                    f"{field}: no pool has the role {role} or mixed, so no request could be answered; add one",
                    field=field,
                )
        if fleet.backend == "ray":
            raise ConfigError(
                f"{field}: roles need backend: processes; replicas of several hosts have no hand-overs in a fleet yet",
                field=field,
            )
        first = own[0]
        for other in own[1:]:
            for name in _OF_BLOCKS:
                a, b = getattr(first.args, name), getattr(other.args, name)
                if a != b:
                    message = (
                        f"{field}: {name} is {a!r} in {first.pool} and {b!r} in {other.pool}, and blocks of the cache "
                        "can't be handed over; set it for the version"
                    )
                    raise ConfigError(message, field=f"{field}.engine.{name}")


def _check_adapters(fleet: Fleet, found: list[PoolSpec]) -> None:
    """Check that each name belongs to one model, or is an adapter of one model."""
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
            message = f"{field}: autoscale can't choose between {len(kinds)} kinds of replicas; give each a fixed number"
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
    """Check a pool that is scaled. `field` is the path of the version, `where` the path of its
    model's `autoscale`."""
    for setting in PARALLEL_SIZES:
        if getattr(spec.args, setting) > 1:
            message = f"{where}: autoscale can't plan replicas over several devices; set {setting}: 1, or drop autoscale"
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
            raise ConfigError(f"{where}: {name!r} appears twice; rename one", field=where)
        seen.add(name)
