"""The state that the server's parts share: the engine, the settings, the requests in flight.

`EngineProtocol` is the part of `AsyncLLM` that the server uses; any object with these members can
be served. A `ServerState` belongs to one app; nothing here is global. All of it is used on one
event loop, so plain attributes need no locks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slipstream import __version__
from slipstream.base.arguments import types_of, wrong_type
from slipstream.base.suggesting import suggesting_init
from slipstream.config import EngineConfig
from slipstream.engine.text.tools import Formats
from slipstream.errors import ConfigError
from slipstream.messages.media import AlignmentQuestion, Matrix
from slipstream.messages.stats import CanaryResult, EngineStats
from slipstream.messages.texts import TextTask
from slipstream.messages.weights import PauseMode, WeightsInfo
from slipstream.outputs import Vectors
from slipstream.params.lora_request import LoRARequest
from slipstream.params.options import RequestOptions
from slipstream.params.prompts import Prompt
from slipstream.params.sampling import SamplingParams
from slipstream.params.search import BeamSearchParams
from slipstream.server.http.load import ServerLoad

if TYPE_CHECKING:
    from prometheus_client import Metric

    from slipstream.engine.beams import BeamSearchOutput
    from slipstream.engine.media.picture_files import PictureFile
    from slipstream.engine.media.prepared import PreparedMedia
    from slipstream.engine.output import Sink
    from slipstream.engine.process.operation_messages import CacheEvents
    from slipstream.server.batches.batches import BatchStore
    from slipstream.server.batches.files import FileStore
    from slipstream.server.http.auth import Keyring
    from slipstream.server.http.limits import Exchange
    from slipstream.server.http.rates import Limiter
    from slipstream.server.http.record import Observers
    from slipstream.server.openai.response_store import ResponseStore
    from slipstream.server.operations.looks import VersionCheck
    from slipstream.server.operations.metrics import MetricCounts, Metrics
    from slipstream.spec.description import ModelDescription


class TokenizerProtocol(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str: ...
    def strips_space_after(
        self, token_ids: list[int], /, *, skip_special_tokens: bool = True
    ) -> bool: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def token_to_id(self, token: str, /) -> int | None: ...
    def id_to_token(self, token_id: int, /) -> str | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def tool_template(self) -> str | None: ...
    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str: ...


class HealthProtocol(Protocol):
    @property
    def ok(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class Watcher(Protocol):
    """A detector of trouble that runs with the server (`fleet/detection`). `findings` are JSON
    objects, newest first."""

    @property
    def findings(self) -> list[dict[str, Any]]: ...
    async def run(self, state: ServerState) -> None: ...


class IdleCheck(Protocol):
    """A check of the model that the server runs while idle; registered with `ServerState.join`."""

    @property
    def name(self) -> str:
        """Name of the check in a replica's status."""

    @property
    def ok(self) -> bool | None:
        """Whether the model's outputs are right. None: not checked yet."""

    async def run(self) -> None:
        """Run checks as long as the server runs."""

    async def interrupt(self) -> None:
        """End this check's request: a pause of the engine would hold it, and a sleep would wait for
        it."""

    def families(self) -> Iterable[Metric]:
        """Metrics of the check."""

    def report(self) -> list[VersionCheck]:
        """Results so far, for a replica's status."""

    def take_kl(self) -> float | None:
        """The divergence in nats measured since the last call; None if none was."""


class EngineProtocol(Protocol):
    formats: Formats

    @property
    def config(self) -> EngineConfig: ...
    @property
    def tokenizer(self) -> TokenizerProtocol | None: ...
    @property
    def model_name(self) -> str: ...
    @property
    def canary(self) -> CanaryResult | None: ...
    async def submit(
        self, prompt: Prompt, sampling: SamplingParams, sink: Sink, options: RequestOptions = ...
    ) -> Callable[[], None]: ...
    def watch_cache(self, watcher: Callable[[CacheEvents], None]) -> Callable[[], None]: ...
    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        options: RequestOptions = ...,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> BeamSearchOutput: ...
    @property
    def adapters(self) -> dict[str, LoRARequest]: ...
    async def load_adapter(self, name: str, path: str, *, load_inplace: bool = False) -> None: ...
    async def unload_adapter(self, name: str) -> None: ...
    @property
    def description(self) -> ModelDescription: ...
    def check_media(self, count: int) -> None: ...
    async def measure_picture(self, data: bytes) -> PictureFile: ...
    async def prepare_media(self, source: Any, detail: str = "auto") -> PreparedMedia: ...
    async def attention_of(self, asked: AlignmentQuestion) -> Matrix: ...
    async def embed(
        self,
        prompts: Sequence[Prompt | tuple[str, str]],
        options: RequestOptions = ...,
        *,
        truncate_to: int | None = None,
        task: TextTask = "embed",
        num_queries: int | None = None,
    ) -> Vectors: ...
    async def stats(self) -> EngineStats: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def is_sleeping(self) -> bool: ...
    async def sleep(self, level: int = 1) -> None: ...
    async def wake_up(self) -> None: ...
    def health(self) -> HealthProtocol: ...
    async def shutdown(self, drain_s: float = 0.0) -> None: ...


class WeightsProtocol(Protocol):
    """The methods of `AsyncLLM` for weight updates (`engine.process.weight_operations`)."""

    async def init_weight_transfer_engine(self, request: Any = None) -> WeightsInfo: ...
    async def leave_weight_group(self, name: str) -> WeightsInfo: ...
    async def start_weight_update(self, request: Any = None) -> WeightsInfo: ...
    async def update_weights(self, request: Any) -> WeightsInfo: ...
    async def finish_weight_update(self, weight_version: str | None = None) -> WeightsInfo: ...
    async def abort_weight_update(self) -> WeightsInfo: ...
    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = False
    ) -> WeightsInfo: ...
    async def resume_generation(self) -> WeightsInfo: ...
    async def reset_prefix_cache(self) -> None: ...
    async def weights(self, *, checksums: bool = False) -> WeightsInfo: ...


class Shortened(Protocol):
    """A shortened prompt, by parts. Tokens are counted by the small model's tokenizer."""

    @property
    def parts(self) -> tuple[str, ...]: ...
    @property
    def num_tokens_before(self) -> int: ...
    @property
    def num_tokens_after(self) -> int: ...
    @property
    def kept_share(self) -> float: ...


class ShortenerProtocol(Protocol):
    """Shortens the parts of a prompt. A part is (text, whether it must stay unchanged). `protect`:
    regular expressions of text kept in every part."""

    async def __call__(
        self,
        parts: Sequence[tuple[str, bool]],
        *,
        keep: float,
        method: Literal["selective", "iterative"],
        unit: Literal["token", "word", "sentence"],
        protect: tuple[str, ...],
    ) -> Shortened: ...


@partial(suggesting_init, what="setting")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the server; the engine has its own. Sizes are in bytes, `_s` in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    served_model_names: tuple[str, ...] = ()  # empty: the engine's own
    api_keys: tuple[str, ...] = ()  # empty: no key is needed, unless there is a keys_file
    keys_file: str | None = None  # made by `slipstream keys`
    # Beyond it: 429. The engine's own queue limit is EngineArgs.max_queue.
    max_concurrent_requests: int = 4096
    max_choices_per_request: int = 2048  # prompts times n, or texts to embed or rerank
    max_body_bytes: int = 8 * 2**20
    max_audio_bytes: int = 25 * 2**20  # OpenAI's limit
    max_audio_seconds: float = 7200.0
    body_timeout_s: float = 30.0  # for a client that sends its body slowly
    drain_timeout_s: float = 30.0
    enable_sleep_mode: bool = False  # enables /sleep and /wake_up
    enable_weight_updates: bool = False  # enables the routes of `server.operations.weights`
    weights_folder: str | None = None  # weights in it may be read over HTTP; None: none
    lora_folder: str | None = None  # adapters in it may be loaded over HTTP; None: no loading
    # HOST or HOST:PORT from which images may be fetched; empty: none
    allowed_media_hosts: tuple[str, ...] = ()
    # Accepted values of `Host` besides this machine's own names and IP addresses: names, `*.DOMAIN` or `*`.
    allowed_hosts: tuple[str, ...] = ()
    # Origins whose pages may send requests from a browser; "*": any.
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    log_format: Literal["text", "json"] = "text"
    # A name in `tool_formats.FORMATS`, or "none"; None: by the chat template
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None  # the same for REASONING
    # Treatment of system prompt lines that differ between requests: see `answers.changing_lines`
    changing_lines: Literal["keep", "billing", "dates"] = "billing"
    # "module:function" by the name that requests use
    logits_processors: dict[str, str] = field(default_factory=dict)
    grpc_port: int | None = None  # port of KServe's protocol over gRPC; None: no gRPC
    state_dir: str | None = None  # stores answers beyond the server's life
    max_stored_responses: int = 1000  # 0: none are stored
    max_stored_bytes: int = 256 * 2**20
    # The only accepted key: that of a fleet's gateway (`server.operations.fleet`).
    fleet_key: str | None = None
    ssl_ca_certs: str | None = None  # clients must show a certificate signed by one of these
    files_dir: str | None = None  # stores files and batches; None: no such routes
    max_files_bytes: int = 2**30  # of all files together
    max_file_bytes: int = 100 * 2**20
    batch_max_concurrent: int | None = None  # lines at once; None: half of max_num_seqs
    batch_beside: int = 0  # lines that run while clients' requests do
    audit_log: str | None = None  # the file
    audit_max_bytes: int = 64 * 2**20  # then the next file begins
    audit_prompts: bool = False  # log the bodies of requests, too
    audit_answers: bool = False  # and the texts of answers: `server.operations.rated`
    # Whether requests are refused or served while the audit log cannot be written.
    audit_failure: Literal["refuse", "serve"] = "refuse"
    self_check: str | None = None  # a fingerprint: `server.operations.self_check`
    self_check_every_s: float = 300.0
    # Receives spans and metrics, such as http://127.0.0.1:4318
    otlp_endpoint: str | None = None
    # Set by the supervisor: folder for state that front ends share and that ends with the server.
    shared_dir: str | None = None

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, need: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {need}, got {getattr(self, name)!r}", field=name)

        for name, hint in types_of(ServerSettings).items():
            if wanted := wrong_type(getattr(self, name), hint):
                require(False, name, wanted)
        require(0 <= self.port <= 65535, "port", "from 0 (any free one) to 65535")
        require(
            self.grpc_port is None or 0 <= self.grpc_port <= 65535,
            "grpc_port",
            "from 0 (any free one) to 65535",
        )
        if self.grpc_port and self.grpc_port == self.port:
            raise ConfigError(
                f"grpc_port and port are both {self.port}; give gRPC another port",
                field="grpc_port",
            )
        for name in (
            *(
                "max_concurrent_requests",
                "max_choices_per_request",
                "max_body_bytes",
                "max_audio_bytes",
                "max_audio_seconds",
                "body_timeout_s",
                "self_check_every_s",
            ),
            *("max_stored_bytes", "max_files_bytes", "max_file_bytes"),
        ):
            require(getattr(self, name) > 0, name, "above 0")
        require(
            self.batch_max_concurrent is None or self.batch_max_concurrent > 0,
            "batch_max_concurrent",
            "above 0",
        )
        for name in ("max_stored_responses", "batch_beside", "drain_timeout_s"):
            require(getattr(self, name) >= 0, name, "0 or more")
        require(self.audit_max_bytes >= 4096, "audit_max_bytes", "4096 or more")
        require(self.audit_failure in ("refuse", "serve"), "audit_failure", "'refuse' or 'serve'")
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in ("batch_max_concurrent", "batch_beside", "max_files_bytes", "max_file_bytes"):
            if self.files_dir is None and getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"{name} has an effect only with files_dir; set that, or leave it out",
                    field=name,
                )
        if self.audit_log is None and (self.audit_prompts or self.audit_failure != "refuse"):
            raise ConfigError(
                "audit_prompts and audit_failure have an effect only with audit_log",
                field="audit_log",
            )
        if self.audit_answers and not self.audit_prompts:
            raise ConfigError(
                "audit_answers has an effect only with audit_prompts", field="audit_answers"
            )
        if self.enable_weight_updates and not self.keys_file:
            raise ConfigError(
                "enable_weight_updates lets clients change every answer; set keys_file, whose keys have roles: "
                "slipstream keys add keys.json --name trainer --role admin",
                field="enable_weight_updates",
            )
        if self.weights_folder is not None and not self.enable_weight_updates:
            raise ConfigError(
                "weights_folder has an effect only with enable_weight_updates",
                field="weights_folder",
            )
        require(self.log_format in ("text", "json"), "log_format", "'text' or 'json'")
        require(
            self.changing_lines in ("keep", "billing", "dates"),
            "changing_lines",
            "'keep', 'billing' or 'dates'",
        )
        assert self.formats  # raises for unknown parser names
        require(all(self.served_model_names), "served_model_names", "made of non-empty names")
        hosts = self.allowed_media_hosts
        require(
            all(
                re.fullmatch(r"[\w.-]+(:\d{1,5})?|\[[0-9a-fA-F:]+\](:\d{1,5})?", host)
                for host in hosts
            ),
            "allowed_media_hosts",
            "made of HOST or HOST:PORT",
        )
        require(
            all(re.fullmatch(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", name) for name in self.allowed_hosts),
            "allowed_hosts",
            "made of NAME without a port, *.DOMAIN or *",
        )
        need = "made of SCHEME://HOST[:PORT] as browsers send it (small letters, no path, no usual port), localhost (any port "
        need += "of it), null or *"
        require(all(map(_is_origin, self.cors_origins)), "cors_origins", need)
        if not all(
            key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys
        ):
            raise ConfigError("an API key must be printable ASCII without spaces", field="api_keys")
        require(self.fleet_key != "", "fleet_key", "a key, or left out")
        if self.grpc_port is not None and (
            self.fleet_key is not None or self.ssl_ca_certs is not None
        ):
            raise ConfigError(
                "gRPC checks neither fleet_key nor ssl_ca_certs; leave grpc_port out",
                field="grpc_port",
            )
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ConfigError(
                "ssl_ca_certs is set without ssl_certfile; clients' certificates need TLS",
                field="ssl_certfile",
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError(
                "ssl_keyfile is set without ssl_certfile; give both", field="ssl_certfile"
            )

    @property
    def formats(self) -> Formats:
        return Formats(self.tool_call_parser, self.reasoning_parser)


def _is_origin(text: str) -> bool:
    """Whether a browser could send `text` as a page's origin, which is compared exactly."""
    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://[^/?#@\sA-Z]+", text)
    if found is None:
        return text in ("*", "null", "localhost")
    return not text.endswith({"http": ":80", "https": ":443"}.get(found[1], "/"))


@dataclass(slots=True)
class ServerState:
    engine: EngineProtocol
    settings: ServerSettings
    observers: Observers
    keys: Keyring
    limiter: Limiter
    shortener: ShortenerProtocol | None = None  # shortens prompts with a small model
    in_flight: set[Exchange] = field(default_factory=set)  # in this process
    load: ServerLoad = field(default_factory=ServerLoad)
    responses: ResponseStore | None = None
    files: FileStore | None = None
    batches: BatchStore | None = None
    # Counts of all front ends, given this one's. None: there is no other.
    totals: Callable[[MetricCounts], Awaitable[list[MetricCounts]]] | None = None
    watch: Watcher | None = None  # None: without a detector
    # Work that runs as long as the server does.
    background: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    checks: list[IdleCheck] = field(default_factory=list)
    on_demand: bool = False  # models are loaded and unloaded on demand (`server.many`)
    created: int = field(default_factory=lambda: int(time.time()))
    _fingerprint: str = ""

    @property
    def metrics(self) -> Metrics:
        return self.observers.metrics

    def join(self, check: IdleCheck) -> None:
        """Runs a check as long as the server runs, and reports its findings."""
        self.checks.append(check)
        self.metrics.more.append(check.families)
        self.background.append(check.run)

    async def interrupt_checks(self) -> None:
        """End the checks' requests, so that a drain or a pause does not wait for them."""
        for check in self.checks:
            await check.interrupt()

    @property
    def draining(self) -> bool:
        """Whether the process accepts no new requests; the states of its models share this flag."""
        return self.load.draining

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: equal for equal versions, models and weight formats."""
        if self._fingerprint:
            return self._fingerprint
        model = self.engine.description
        facts = (__version__, model.family.model_type, model.spec.num_parameters, model.dtype)
        form = (model.scheme, model.gguf_type)
        digest = hashlib.blake2s(repr(facts + form).encode(), digest_size=5).hexdigest()
        self._fingerprint = f"fp_{digest}"
        return self._fingerprint

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.settings.served_model_names or (self.engine.model_name,)
