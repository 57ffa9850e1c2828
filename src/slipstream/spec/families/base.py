"""A family of models. No torch. What families share is in `builders.py`, `metadata.py` and `names.py`.

1. A family has a function from a Hugging Face config to a `ModelSpec`, and a table from checkpoint names to ours.
2. Reading is strict. A key of the config is read, or known to have no effect on inference; any other raises an error.
3. For a GGUF file, the family makes a Hugging Face config from the metadata, which is read as strictly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slipstream.errors import UnsupportedModelError
from slipstream.spec.families.mtp import MTPFormat
from slipstream.spec.media.medium import MediaSpec
from slipstream.spec.media.vision import ImageProcessing
from slipstream.spec.model import ModelSpec
from slipstream.spec.parameters import Placement

T = TypeVar("T")
Names = dict[str, Placement]

NO_EFFECT = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
    "_from_model_config", "_model_name_or_path", "_name_or_path", "_num_labels", "activation_dropout", "architectures",
    "attention_dropout", "attention_dropout_prob", "attention_probs_dropout_prob", "attn_dropout", "attn_dropout_prob",
    "attn_implementation", "attn_pdrop", "auto_map", "axolotl_config_path", "bad_words_ids", "base_model_name_or_path",
    "begin_suppress_tokens", "bos_token_id", "classifier_dropout", "classifier_dropout_prob", "cls_token_id",
    "custom_pipelines", "dropout", "dropout_rate", "dtype", "emb_pdrop", "embd_pdrop", "embed_dropout", "embedding_dropout",
    "eos_token_id", "exponential_decay_length_penalty", "ffn_dropout", "finetuning_task", "flash_attention",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "head_dropout", "hidden_dropout",
    "hidden_dropout_prob", "id2label", "init_device", "init_std", "initializer_range", "is_llama_config",
    "keys_to_ignore_at_inference", "label2id", "language", "layer_dropout", "layerdrop", "license", "mask_token_id",
    "max_sequence_length", "model_max_length", "model_type", "neftune_noise_alpha", "output_attentions",
    "output_hidden_states", "output_past", "pad_token_id", "pipeline_tag", "prefix", "pretraining_tp", "problem_type",
    "resid_pdrop", "residual_dropout", "return_dict", "rope_interleaved", "sep_token_id", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "suppress_tokens", "tags",
    "task_specific_params", "token_dropout", "tokenizer_class", "tokenizer_name", "torch_dtype", "trained_with",
    "training_args", "transformers.js_config", "transformers_version", "unk_token_id", "unsloth_fixed",
    "unsloth_tied_weights", "unsloth_version", "use_cache", "use_flash_attention", "use_flash_attention_2",
    "use_flash_attn", "vocab_file",
))  # fmt: skip
"""Config keys that don't change the forward pass: about origin, training, tokenizer and sampling.
`spec.generation` reads the sampling keys that are applied and names the rest."""

WRITTEN_BY_ALL: dict[str, Any] = {
    "add_cross_attention": False, "chunk_size_feed_forward": 0, "diversity_penalty": 0.0, "do_sample": False,
    "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "is_decoder": False, "is_encoder_decoder": False,
    "length_penalty": 1.0, "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_return_sequences": 1, "output_scores": False, "pruned_heads": {}, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict_in_generate": False, "temperature": 1.0, "tf_legacy_loss": False,
    "tie_encoder_decoder": False, "top_k": 50, "top_p": 1.0, "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
"""Defaults that transformers 4 writes when it saves a config in full, as it does for nested configs."""

GGUF_NO_EFFECT = frozenset((
    "rope.scaling.finetuned",
    "vocab_size",  # redundant: the embedding's number of rows
    "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight",  # shapes of tensors that are loaded or refused anyway
))  # fmt: skip
"""Keys of a GGUF file that have no effect, without the architecture's prefix."""

GGUF_SHAPES = (
    "token_types.weight",
    "enc.blk.0.ffn_gate.weight",
    "blk.0.attn_q.bias",
    "blk.0.attn_q_norm.weight",
)
"""Tensors of a GGUF file whose shapes are passed to `config` with the metadata, which lacks this information."""

GGUF_FREQUENCIES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors of a GGUF file that are passed to `config` as lists: the divisor of each rotary frequency."""

GGUF_UNREAD = (r"dec\.blk\.\d+\.cross_attn_rel_b\.weight",)
"""Tensors of a GGUF file that are ignored: old writers of T5 stored an unused bias of cross attention."""

ROTARY_BUFFERS = (r".*rotary(_pos)?_emb\.inv_freq",)
"""Tensors of any checkpoint that are ignored: rotary frequencies, which old versions of transformers saved."""

MAX_SIZE = 2**31 - 1
"""The largest size in a config: kernels index with 32 bits."""

MAX_LAYERS = 4096
LAYER_COUNTS = frozenset((
    "block_count", "decoder_layers", "n_layer", "n_layers", "num_decoder_layers", "num_hidden_layers", "num_layers",
))  # fmt: skip
"""Config keys limited to `MAX_LAYERS`, since a spec has one object per layer."""


class ConfigReader:
    """Reads keys of a config. `finish` raises an error if an unread key could matter. Error
    messages put `prefix` before key names."""

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str = "config.json",
        *,
        prefix: str = "",
        no_effect: frozenset[str] = NO_EFFECT,
    ) -> None:
        self._config = config
        self._where = where
        self.prefix = prefix
        self._no_effect = no_effect
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._config.get(key) is not None

    def says(self, key: str) -> bool:
        """Whether the config has the key, even with the value null."""
        return key in self._config

    def assume(self, **values: Any) -> None:
        """Sets defaults of transformers' config class, for configs that list only what differs from
        them."""
        self._config = {
            **self._config,
            **{key: value for key, value in values.items() if key not in self},
        }

    def assume_missing(self, **values: Any) -> None:
        """`assume` for keys where null has another meaning than a missing key."""
        self.assume(**{key: value for key, value in values.items() if not self.says(key)})

    def put(self, **values: Any) -> None:
        """Overwrites values of the config."""
        self._config = {**self._config, **values}

    def alias(self, names: Mapping[str, str]) -> None:
        """Accepts other names of keys: `names` maps key to other name. Both may be present if their values agree."""
        for key, other in names.items():
            if other in self:
                self.assume(**{key: self._config[other]})
                self.require(other, self._config[key])

    def take(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`, which must be of type `kind`. A missing key gives `default`, or an error if that is None."""
        self._read.add(key)
        value = self._config.get(key)
        if value is None:
            if default is None:
                key = self.prefix + key
                raise UnsupportedModelError(f"{self._where} lacks {key!r}", field=key)
            return default
        if (
            kind is float
            and isinstance(value, int)
            and not isinstance(value, bool)
            and abs(value) < 2**63
        ):
            return float(value)  # type: ignore[return-value]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.unsupported(key, f"must be of type {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.unsupported(key, "must be a finite number")
        if isinstance(value, int) and abs(value) > MAX_SIZE:
            raise self.unsupported(key, f"must be at most {MAX_SIZE}")
        return value

    def value(self, key: str) -> Any:
        """Value of `key`, unchecked; None if the key is missing."""
        self._read.add(key)
        return self._config.get(key)

    def maybe(self, key: str, kind: type[T]) -> T | None:
        self._read.add(key)
        return self.take(key, kind) if key in self else None

    def size(self, key: str, default: int | None = None) -> int:
        value = self.take(key, int, default)
        limit = MAX_LAYERS if key in LAYER_COUNTS else MAX_SIZE
        if not 1 <= value <= limit:
            raise self.unsupported(key, f"must be from 1 to {limit}")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Raises an error unless `key` is missing or one of `allowed`, the values that are implemented."""
        self._read.add(key)
        if self._config.get(key) not in (None, *allowed):
            raise self.unsupported(
                key, "only " + " or ".join(repr(a) for a in allowed) + " is supported"
            )

    def require_all(self, **values: Any) -> None:
        """Raises an error unless each key is missing or has its value, the only one that is implemented."""
        for key, value in values.items():
            self.require(key, value)

    def ignore(self, *keys: str) -> None:
        """Accepts keys that have no effect in this family."""
        self._read.update(keys)

    def part(self, key: str) -> ConfigReader:
        """A reader of the nested object at `key`. Call its `finish` too."""
        inner = self.take(key, dict)
        return ConfigReader(
            inner, self._where, prefix=f"{self.prefix}{key}.", no_effect=self._no_effect
        )

    def unsupported(self, key: str, why: str) -> UnsupportedModelError:
        name = self.prefix + key
        return UnsupportedModelError(
            f"{self._where}: {name} = {self._config.get(key)!r}: {why}", field=name
        )

    def finish(self) -> None:
        unknown = set(self._config) - self._read - self._no_effect
        unknown = {k for k in unknown if self._config[k] not in (None, WRITTEN_BY_ALL.get(k))}
        if unknown:
            keys = [f"{self.prefix}{k} = {self._config[k]!r}" for k in sorted(unknown)]
            raise UnsupportedModelError(
                f"{self._where} has {', '.join(keys)}, which Slipstream does not know: it may change what the model "
                "computes, so it is not ignored",
                field=self.prefix + min(unknown),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How llama.cpp stores the family.

    `architecture`: llama.cpp's name of the family; `also`: further names. `config`: function that
    makes a Hugging Face config from the metadata, whose keys come without the architecture's
    prefix. `names`: the table of tensor names. `ignored`: regular expressions of tensors that are
    not used. `shapes`: further tensors, besides `GGUF_SHAPES`, whose shapes `config` receives with
    the metadata.
    """

    architecture: str
    config: Callable[[ConfigReader], dict[str, Any]]
    names: Callable[[ModelSpec], Names]
    ignored: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    mtp: MTPFormat | None = None  # multi-token-prediction layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models. `names(spec)` maps every tensor name of a checkpoint to its placement.
    `ignored`: regular expressions of tensors that are not used."""

    model_type: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigReader], ModelSpec]
    names: Callable[[ModelSpec], Names]
    prefixes: tuple[str, ...] = ("",)  # prefixes that some writers put before every name
    ignored: tuple[str, ...] = ()
    # Further expressions of tensors that are not used, where they depend on the model.
    unread: Callable[[ModelSpec], tuple[str, ...]] | None = None
    # Numbers that are the same in every model: the end of a name → ends of the names written next to it.
    constants: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    gguf: GGUFFamily | None = None
    mtp: MTPFormat | None = None  # multi-token-prediction layers in safetensors checkpoints
    nested_config: str | None = None  # the key that holds the language model's own config
    # its keys may also be at the top level, mixed with those that `media` reads
    flat_config: bool = False
    # from the keys outside the nested config; None if the model has no media encoder
    media: Callable[[ConfigReader, ModelSpec], MediaSpec | None] | None = None
    # Image preprocessing, from the processor's config, every key of which is checked. Audio preprocessing has no settings.
    processing: Callable[[ConfigReader, Any], ImageProcessing | None] | None = None
