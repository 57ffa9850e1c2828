"""The description of a model on disk, read from its config or its GGUF header. No torch, no
weights."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import CheckpointError, SlipstreamError, UnsupportedModelError
from slipstream.spec.families import find_family, find_gguf_family, is_base
from slipstream.spec.families.base import (
    GGUF_FREQUENCIES,
    GGUF_NO_EFFECT,
    GGUF_SHAPES,
    NO_EFFECT,
    ConfigReader,
    Family,
)
from slipstream.spec.families.names import canonical
from slipstream.spec.generation import Words, banned_words, not_applied
from slipstream.spec.media.audio import SpeechSpec, read_speech
from slipstream.spec.media.vision import ImageProcessing, VisionSpec
from slipstream.spec.model import ModelSpec
from slipstream.spec.parameters import Placement, Shape, orders_rows, parameters
from slipstream.spec.pooling import (
    CONFIG_KEYS,
    LAST_TOKEN,
    PoolingSpec,
    gguf_dense,
    gguf_pooling,
    read_pooling,
)
from slipstream.spec.scheme import RowFormat, Scheme, WeightFormat
from slipstream.spec.stored.gguf import GGUFFile
from slipstream.spec.stored.gguf_ends import end_tokens
from slipstream.spec.stored.gguf_parts import model_files
from slipstream.spec.stored.gguf_types import CPU_BLOCK_BYTES, GPU_BLOCK_BYTES
from slipstream.spec.stored.native_formats import native_formats, rounds
from slipstream.spec.stored.quantization_config import (
    COLUMNS_NAME,
    MODELOPT_CONFIG,
    StoredQuantization,
    read_quantization,
    with_columns,
)
from slipstream.spec.stored.safetensors import find_tensor, same_numbers, tensor_names, weight_files


@dataclass(frozen=True, slots=True)
class StoredType:
    """A GGUF storage type, with the number of values and bytes that a file stores in it."""

    name: str
    num_values: int
    num_bytes: int


def usual_sampling() -> dict[str, float]:
    """Default sampling of a model whose files don't define it: llama.cpp's defaults. OpenAI's
    default, all tokens at temperature 1, soon makes a small model incoherent."""
    return {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model on disk.

    `dtype` is the one the checkpoint was saved in. `eos_token_ids` come from the generation config
    or, without one, from the config. `gguf` is the open file, so that its header is read only once.
    """

    name: str
    path: Path
    format: Literal["safetensors", "gguf"]
    family: Family
    spec: ModelSpec
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    # storage format of the weights, or of the cache's scales
    quantization: StoredQuantization | None = None
    pooling: PoolingSpec = LAST_TOKEN
    # Default sampling parameters from the generation config, or `usual_sampling`.
    sampling: Mapping[str, float] = field(default_factory=usual_sampling)
    # storage types in a GGUF file, the one with the most bytes first
    stored: tuple[StoredType, ...] = ()
    # How pictures are prepared, for a model with an encoder of them.
    processing: ImageProcessing | None = None
    speech: SpeechSpec | None = None  # the tokens of a model that reads audio
    banned: Words = ()  # token sequences that the generation config bans
    not_applied: tuple[str, ...] = ()  # settings of the generation config that are not applied
    gguf: GGUFFile | None = field(default=None, repr=False, compare=False)

    def taking_media(self, most: int | None) -> ModelDescription:
        """The model for prompts with up to `most` images or sounds (None: no limit). With 0 only
        the decoder is loaded, without the media encoder."""
        if most != 0:
            return self
        return dataclasses.replace(
            self, spec=dataclasses.replace(self.spec, media=None), processing=None
        )

    @property
    def text_task(self) -> Literal["embed", "token_embed"]:
        """The model's pooling task. "embed": one vector, or a classifier's scores, for a text. "token_embed": one row for
        each token."""
        classifier = self.spec.classifier
        of_tokens = classifier is not None and classifier.pooling == "tokens"
        return "token_embed" if of_tokens or self.pooling.kind == "tokens" else "embed"

    @property
    def scheme(self) -> str | None:
        """Name of the scheme in `SCHEMES` in which all linear layers are stored; None if none
        fits."""
        return self.quantization.scheme if self.quantization is not None else None

    @property
    def head_name(self) -> str:
        """Name of the untied output head's weight in the family's checkpoints."""
        ends = _ends(self.family, self.spec)
        return next(name for name, at in ends.items() if at.target == "head.weight")

    @property
    def gguf_type(self) -> str | None:
        """The GGUF type that stores most values of the linear layers; None for other checkpoints."""
        if self.gguf is None:
            return None
        sizes: Counter[str] = Counter()
        for tensor in self.gguf.tensors.values():
            if len(tensor.shape) > 1:
                sizes[tensor.type] += math.prod(tensor.shape)
        return sizes.most_common(1)[0][0] if sizes else None

    @property
    def kv_cache(self) -> RowFormat | None:
        """The format of an 8-bit cache for which the checkpoint has scales."""
        return self.quantization.kv_cache if self.quantization is not None else None

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every parameter, by Slipstream's names."""
        return parameters(self.spec)

    def native_formats(self, rounded: frozenset[str]) -> dict[str, WeightFormat]:
        """The formats of weights that stay as a compressed-tensors checkpoint stores them, by our
        names.

        `rounded` names the products that the ops have (`OpSet.rounded`). Other weights are expanded
        at load. Empty for other kinds of checkpoint.
        """
        if self.quantization is None or self.quantization.formats is None:
            return {}
        return native_formats(
            self.family.names(self.spec), self.shapes, self.quantization.formats, rounded
        )

    def split_columns(self) -> dict[str, tuple[int, ...]]:
        """Input columns that stay in the model's dtype, for each weight with int8 inputs, by our
        names. CheckpointError if tensors that we stack into one weight have different columns."""
        found: dict[str, tuple[int, ...]] = {}
        formats = self.quantization.formats if self.quantization is not None else None
        if formats is None or not formats.columns:
            return found
        names = self.family.names(self.spec)
        if unknown := [module for module in formats.columns if f"{module}.weight" not in names]:
            raise CheckpointError(
                f"{COLUMNS_NAME}: the model has no {unknown[0]}", field=unknown[0]
            )
        for name, place in names.items():
            columns = formats.columns.get(name.removesuffix(".weight"), ())
            if found.setdefault(place.target, columns) != columns:
                raise CheckpointError(
                    f"{COLUMNS_NAME}: {name} has other columns than the tensors of the same weight",
                    field=name,
                )
            if columns and max(columns) >= self.shapes[place.target][1]:
                raise CheckpointError(
                    f"{COLUMNS_NAME}: {name} has no column {max(columns)}", field=name
                )
        return {target: columns for target, columns in found.items() if columns}

    def gguf_bytes(
        self, dtype_bytes: int, scheme: Scheme | None = None, *, on_cpu: bool = True
    ) -> int | None:
        """Bytes of a GGUF file's weights on a CPU or a GPU; None for other checkpoints.

        Weights that `scheme` quantizes are counted in its format. Others stay in the file's types
        where the device has kernels for them.
        """
        if self.gguf is None or self.family.gguf is None:
            return None
        held = CPU_BLOCK_BYTES if on_cpu else GPU_BLOCK_BYTES
        names, total = self.family.gguf.names(self.spec), 0
        for name, tensor in self.gguf.tensors.items():
            *outer, inner = tensor.shape
            num_values, place = math.prod(tensor.shape), names.get(name, Placement(""))
            target = place.target
            if scheme is not None and rounds(scheme, target):
                total += scheme.weight_bytes(math.prod(outer), inner, on_cpu=on_cpu)
            elif (
                tensor.type in held
                and orders_rows(place.transform)
                and not (scheme is not None and scheme.head and target == "embed.weight")
            ):
                total += num_values * held[tensor.type] // 256
            else:
                total += num_values * dtype_bytes
        if (
            scheme is not None and scheme.head and self.spec.tied_embeddings
            # The quantized head is a copy of the embedding table, so it counts in addition to it.
        ):
            total += scheme.weight_bytes(self.spec.vocab_size, self.spec.embed_width, on_cpu=on_cpu)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDescription(ModelDescription):
    """A second component in a checkpoint, next to the model. It has the shapes of its parameters, by our
    names, and a family that only gives the names of its tensors. A loader reads it as it reads the model."""

    part: Mapping[str, Shape]

    @property
    def shapes(self) -> dict[str, Shape]:
        return dict(self.part)


def read_spec(path: Path) -> ModelDescription:
    """The description of a folder with a config.json, or of a .gguf file.

    UnsupportedModelError names what is unknown, and covers any other way in which a config can be
    malformed. CheckpointError: the files are too small for the config's sizes.
    """
    try:
        description = _read(path)
        _check_sizes(description)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        if isinstance(error, SlipstreamError):
            raise
        raise UnsupportedModelError(
            f"{path}: the config can't be understood ({type(error).__name__}: {error})",
            field="config",
        ) from error
    return description


_VALUES_PER_BYTE = 16
"""Maximum values per byte in any weight format, with some margin. A zero mask has 8."""
_SPARE_PARAMETERS = 2**24
"""Number of missing parameters tolerated by the size check; loading the weights reports them by name."""


def _check_sizes(description: ModelDescription) -> None:
    """Raise CheckpointError if the config has far more parameters than the files can hold.

    A folder without weights (for load_format="dummy"), or without some that its index names, is not
    checked.
    """
    if description.gguf is not None:
        room = 2 * sum(tensor.numel for tensor in description.gguf.tensors.values())
    else:
        files = weight_files(description.path)
        whole = all(file.is_file() for file in files)
        room = _VALUES_PER_BYTE * sum(file.stat().st_size for file in files) if whole else 0
    needed = description.spec.num_parameters
    if room and needed > room + _SPARE_PARAMETERS:
        raise CheckpointError(
            f"{description.path}: the config's sizes make {needed:,} parameters, more than its files can hold: "
            "they are cut off, or the config is another model's",
            field="hidden_size",
        )


def _read(path: Path) -> ModelDescription:
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path} is neither a folder with a config.json nor a .gguf file", field="model"
            )
        return _read_gguf(path)
    if not (path / "config.json").is_file():
        files = model_files(path)
        if len(files) == 1:
            return _read_gguf(files[0])
        raise CheckpointError(
            f"{path} holds no config.json"
            + (" and several models in .gguf files" if files else ""),
            field="model",
        )
    return _read_folder(path)


def _read_folder(path: Path) -> ModelDescription:
    config = read_json(path / "config.json")
    family = find_family(config.get("model_type"), config.get("architectures"))
    own = config
    if family.nested_config is not None:
        own = config.get(family.nested_config) or (config if family.flat_config else {})
        if not isinstance(own, dict):
            raise UnsupportedModelError(
                f"{family.nested_config} must be an object", field=family.nested_config
            )
        own = {"tie_word_embeddings": config.get("tie_word_embeddings"), **own}
    keys = ("quantization_config", "compression_config")
    compressed = next((x[k] for x in (config, own) for k in keys if x.get(k)), None)
    if not compressed and (path / MODELOPT_CONFIG).is_file():
        compressed = {"quant_method": "modelopt", **read_json(path / MODELOPT_CONFIG)}
    beside = CONFIG_KEYS | {*keys}
    own = {k: v for k, v in own.items() if k not in beside}
    spec, processing = _with_media(
        path, family, {k: v for k, v in config.items() if k not in beside}, own
    )
    alone = is_base(family, config.get("architectures"))
    spec = _with_stored_head(path, family, spec, alone)
    if compressed is not None and not isinstance(compressed, Mapping):
        raise UnsupportedModelError(
            "quantization_config must be an object", field="quantization_config"
        )
    quantization = (
        read_quantization(compressed, tied_embeddings=spec.tied_embeddings) if compressed else None
    )
    if quantization is not None and spec.shared:
        raise UnsupportedModelError(
            f"{path.name} is quantised, and layers of {spec.family} share weights, which are read dense; load the dense "
            "checkpoint with quantization=…",
            field="quantization_config",
        )
    if (columns := path / COLUMNS_NAME).is_file():
        quantization = with_columns(quantization, read_json(columns))
    generation = path / "generation_config.json"
    defaults = read_json(generation) if generation.is_file() else {}
    eos = defaults.get("eos_token_id", own.get("eos_token_id", config.get("eos_token_id")))
    spec = _with_beginning(spec, defaults if generation.is_file() else own)
    of_answers = defaults if generation.is_file() else {**config, **own}
    ends = _ids("eos_token_id", eos, spec.vocab_size)
    speaks = spec.encoder is not None and spec.encoder.audio is not None
    pooling = read_pooling(path, config, is_encoder=spec.is_encoder)
    if (
        pooling.score_tokens is not None
        and max(n or 0 for n in pooling.score_tokens) >= spec.vocab_size
    ):
        raise CheckpointError(
            f"{path}: its LogitScore step names tokens that the vocabulary lacks",
            field="true_token_id",
        )
    dtype = (
        own.get("dtype")
        or own.get("torch_dtype")
        or config.get("dtype")
        or config.get("torch_dtype")
    )
    if dtype is None:  # the dtype before quantization was 16 bits
        dtype = "float32" if quantization is None or quantization.scheme is None else "bfloat16"
    return ModelDescription(
        name=path.name,
        path=path,
        format="safetensors",
        family=family,
        spec=spec,
        dtype=str(dtype),
        eos_token_ids=ends,
        bos_token_id=next(
            iter(_ids("bos_token_id", own.get("bos_token_id"), spec.vocab_size)), None
        ),
        quantization=quantization,
        pooling=pooling,
        sampling=_sampling(defaults),
        processing=processing,
        speech=_speech(path, defaults, spec),
        # a speech model's rules suppress its tokens
        banned=() if speaks else banned_words(of_answers, ends, spec.vocab_size),
        not_applied=not_applied(of_answers, speech=speaks) if spec.generates else (),
    )


def _with_beginning(spec: ModelSpec, generation: Mapping[str, Any]) -> ModelSpec:
    """The spec with the answer's first tokens (decoder start tokens) from the generation config.
    Only for encoder-decoders of text."""
    encoder = spec.encoder
    if encoder is None or encoder.audio is not None:
        return spec
    start, forced = (
        _ids(name, generation.get(name), spec.vocab_size)
        for name in ("decoder_start_token_id", "forced_bos_token_id")
    )
    if not forced and generation.get("force_bos_token_to_be_generated"):  # old BART's
        forced = _ids("bos_token_id", generation.get("bos_token_id", 0), spec.vocab_size)
    first = (*start, encoder.start_token_id)[0]
    encoder = dataclasses.replace(encoder, start_token_id=first, forced=forced[:1])
    return dataclasses.replace(spec, encoder=encoder)


def _speech(path: Path, generation: Mapping[str, Any], spec: ModelSpec) -> SpeechSpec | None:
    encoder = spec.encoder
    if encoder is None or encoder.audio is None:
        return None
    heads = [attention.num_heads for attention in spec.attentions]
    how: Any = dict(start=encoder.start_token_id, vocab_size=spec.vocab_size, heads=heads)
    return read_speech(path, generation, audio=encoder.audio, **how)


def _ends(family: Family, spec: ModelSpec) -> Mapping[str, Placement]:
    """Placements of the parameters outside the layers by the family's names, including an untied head's."""
    encoder = spec.encoder
    if encoder is not None:
        encoder = dataclasses.replace(encoder, layers=encoder.layers[:1])
    first = dataclasses.replace(
        spec, layers=spec.layers[:1], encoder=encoder, tied_embeddings=False, media=None, stage=None
    )
    return family.names(first)


def _with_stored_head(path: Path, family: Family, spec: ModelSpec, alone: bool) -> ModelSpec:
    """The spec with an output head as the checkpoint stores it, whatever its config says.

    1. A stored head that differs from the table of embeddings unties the model. That is
       transformers 5's rule: fine-tunes of tied models may have such heads.
    2. An encoder-decoder without a stored head is tied.
    3. `alone`: the architecture is a decoder without a head. It generates if it is tied, or if it
       stores a head.

    The tables are compared byte by byte: a different head is found within its first bytes, an equal
    one is read in full.
    """
    tied = spec.tied_embeddings or spec.encoder is not None
    if not spec.generates or not (tied or alone):
        return spec
    if not (names := tensor_names(path)) and tied:
        return spec
    ends = _ends(family, spec)

    def target(name: str) -> str:
        key = canonical(name, family.prefixes, ends)
        return "" if key is None else ends[key].target

    stored = {target(name): name for name in names}
    embed = find_tensor(path, stored["embed.weight"]) if "embed.weight" in stored else None

    def is_embed(name: str) -> bool:
        found = find_tensor(path, name)
        return embed is None or found is None or same_numbers(found, embed)

    stacks = {
        f"{base}{x}coder.embed_tokens.weight" for x in ("en", "de") for base in ("", "model.")
    }
    for name in names & stacks:
        if spec.encoder is not None and not is_embed(name):
            raise UnsupportedModelError(
                f"{name} is not {stored['embed.weight']}: a stack with separate embeddings is not supported",
                field=name,
            )
    if "head.weight" in stored and not tied:
        return spec
    if "head.weight" in stored:
        return dataclasses.replace(spec, tied_embeddings=is_embed(stored["head.weight"]))
    rounded = any(  # the head is quantized, under a name such as lm_head.weight_packed
        not target(name) and target(f"{name.rpartition('.')[0]}.weight") == "head.weight"
        for name in names
    )
    if tied:
        return dataclasses.replace(spec, tied_embeddings=not rounded)
    if rounded:
        return spec
    if spec.embed_size is not None:
        raise UnsupportedModelError(
            "word_embed_proj_dim: projected states are not supported without a head",
            field="word_embed_proj_dim",
        )
    return dataclasses.replace(spec, headless=True, head_bias=False)


def _with_media(
    path: Path, family: Family, config: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[ModelSpec, ImageProcessing | None]:
    """The spec made from the decoder's `own` config, plus the media encoder that the whole `config`
    describes, if any."""
    if family.media is None or family.processing is None:
        return family.read(ConfigReader(own)), None
    outer = ConfigReader(config)
    if family.flat_config and not config.get(family.nested_config or ""):
        beside = {
            "vision_config",
            "text_config",
            *(k for k in config if k.endswith("_token_id") and k not in NO_EFFECT),
        }
        own = {k: v for k, v in own.items() if k not in beside}
    text = family.read(ConfigReader(own))
    media = family.media(outer, text)
    if media is None:
        return text, None
    name, said = "preprocessor_config.json", dict[str, Any]()
    if (path / name).is_file():
        said = read_json(path / name)
    elif (path / "processor_config.json").is_file():
        name = "processor_config.json"
        said = read_json(path / name).get("image_processor") or {}
    processing = family.processing(ConfigReader(said, name), media)
    if isinstance(media, VisionSpec) and media.bidirectional:
        assert isinstance(processing, ImageProcessing)
        media = dataclasses.replace(media, whole_tokens=processing.most_tokens(media))
    return dataclasses.replace(text, media=media), processing


def _sampling(config: Mapping[str, Any]) -> dict[str, float]:
    """Default sampling parameters from a generation config: `repetition_penalty`, and with
    `do_sample` temperature and filters. Without any of these `usual_sampling` applies."""
    drawn = ("temperature", "top_p", "top_k", "min_p") if config.get("do_sample") else ()
    found = {
        name: value
        for name in (*drawn, "repetition_penalty")
        if (value := config.get(name)) is not None
    }
    for name, value in found.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise UnsupportedModelError(
                f"generation_config.json: {name} = {value!r} is not a number", field=name
            )
    return found if found.keys() & set(drawn) else usual_sampling() | found


def huggingface_config(description: ModelDescription) -> dict[str, Any]:
    """The model's config.json without its quantization_config. For a GGUF file it is made from the
    metadata, and has only keys that affect the computation."""
    if description.format == "safetensors":
        config = read_json(description.path / "config.json")
        spec = description.spec
        if (
            spec.has_head
            and spec.encoder is None
            and config.get("tie_word_embeddings") is not False
        ):
            # The stored head differs from the table, or the family's default is untied.
            config["tie_word_embeddings"] = False
        return {
            k: v
            for k, v in config.items()
            if k not in ("quantization_config", "compression_config")
        }
    assert description.gguf is not None
    own, family = _gguf_config(description.gguf), description.family
    tokens = {
        "bos_token_id": description.bos_token_id,
        "eos_token_id": next(iter(description.eos_token_ids), None),
    }
    named = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_type,
        "dtype": description.dtype,
    }
    return {**named, **{key: value for key, value in own.items() if value is not None}, **tokens}


_MAX_FREQUENCIES = 65_536


def _gguf_config(file: GGUFFile) -> dict[str, Any]:
    architecture = file.metadata.get("general.architecture")
    family = find_gguf_family(architecture)
    assert family.gguf is not None
    prefix = f"{architecture}."
    said = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    frequencies = [
        t for t in map(file.tensors.get, GGUF_FREQUENCIES) if t is not None and t.type == "F32"
    ]
    if large := [t.name for t in frequencies if t.numel > _MAX_FREQUENCIES]:
        raise CheckpointError(
            f"{file.path}: the tensor {large[0]} has too many numbers for frequencies",
            field=large[0],
        )
    said |= {t.name: file.raw(t.name).view("<f4").flatten().tolist() for t in frequencies}
    said |= {t.name: list(t.shape) for t in map(file.tensors.get, GGUF_SHAPES) if t is not None}
    for pattern in family.gguf.shapes:
        said |= {n: list(t.shape) for n, t in file.tensors.items() if re.fullmatch(pattern, n)}
    reader = ConfigReader(said, file.path.name, prefix=prefix, no_effect=GGUF_NO_EFFECT)
    reader.ignore("pooling_type")  # `gguf_pooling` reads it
    config = family.gguf.config(reader)
    reader.finish()
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(
            f"{file.path} lacks the tensor token_embd.weight", field="token_embd.weight"
        )
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    return config


def _read_gguf(path: Path) -> ModelDescription:
    file = GGUFFile(path)
    config, meta = _gguf_config(file), file.metadata
    family = find_gguf_family(meta.get("general.architecture"))
    spec = family.read(ConfigReader(config, path.name))
    return ModelDescription(
        name=str(meta.get("general.name", file.path.stem)),
        path=file.path,
        format="gguf",
        family=family,
        spec=spec,
        dtype="bfloat16",
        eos_token_ids=_ids("eos_token_id", list(end_tokens(meta)), spec.vocab_size),
        bos_token_id=next(
            iter(_ids("bos_token_id", meta.get("tokenizer.ggml.bos_token_id"), spec.vocab_size)),
            None,
        ),
        pooling=dataclasses.replace(
            gguf_pooling(
                meta.get(f"{meta.get('general.architecture')}.pooling_type"),
                is_encoder=spec.is_encoder,
            ),
            dense=gguf_dense(file.path, {name: tuple(t.shape) for name, t in file.tensors.items()}),
        ),
        stored=_stored(file),
        gguf=file,
    )


def _stored(file: GGUFFile) -> tuple[StoredType, ...]:
    found: dict[str, list[int]] = {}
    for tensor in file.tensors.values():
        counts = found.setdefault(tensor.type, [0, 0])
        counts[0] += tensor.numel
        counts[1] += tensor.nbytes
    return tuple(
        sorted(
            (StoredType(name, *counts) for name, counts in found.items()),
            key=lambda t: -t.num_bytes,
        )
    )


def _ids(key: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """A config's token ids, given as one id, a list or null.

    Ids outside the vocabulary can't be generated and are left out. CheckpointError for other
    values: answers would never end, for no visible reason.
    """
    values = [v for v in (value if isinstance(value, list) else [value]) if v is not None]
    for wrong in (v for v in values if isinstance(v, bool) or not isinstance(v, int)):
        raise CheckpointError(
            f"{key} must be a token id or a list of them, got {str(wrong)[:60]!r}", field=key
        )
    return tuple(dict.fromkeys(v for v in values if 0 <= v < vocab_size))


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", field=path.name) from error
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path} must hold a JSON object", field=path.name)
    return dict(value)
