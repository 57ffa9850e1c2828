"""The metadata of a GGUF file, copied from another file or derived from a folder's config and tokenizer.

A folder's keys are those of a Llama-like model. The file is then read back (`same_model`) to check that the
keys are complete. So no family needs a list of its own, and none is written wrongly.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Regex, pre_tokenizers

from slipstream.engine.text.gguf_tokenizer import SPLITS
from slipstream.engine.text.sentencepiece import Kind
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tokenizer_folder import read as read_folder
from slipstream.errors import UnsupportedModelError
from slipstream.kernels.positions import rope_angles
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import AttentionSpec, MoESpec
from slipstream.spec.positions import Llama3Scaling, RopeSpec
from slipstream.spec.stored.gguf_ends import END_NAMES

_logger = logging.getLogger(__name__)

OF_THE_FILE = (
    *("GGUF.", "split.", "quantize.", "general.architecture"),
    *("general.file_type", "general.quantization_version"),
)
"""Prefixes of keys about how a file was made, not about the model."""

SAMPLES = (
    "Hello, world! It's 2026: we've 1234567 reasons.\n\n  def f(x):\n\treturn x**2  # ok\r\n",
    "Größe, naïve café, 中文字符 and かな, עברית, 🙂🙂 — “quotes” 'S 'll DON'T\n \n\n  end ",
    "a_b-c/d\\e (f) [g] {h} <i> |j| 3.14 1,000 ½ x² ABCdef XMLHttp \u00a0nbsp\u3000wide",
)
PROBES = (
    *SAMPLES,
    "".join(
        a + b + c for a, b, c in itertools.product("aB1½é\u0301中かש'-_$.🙂 \n\r\t\u00a0", repeat=3)
    ),
)
"""Texts that distinguish pre-tokenizers: `SAMPLES`, and letters, accents, digits, signs and spaces
in all orders of three."""

END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<EOT>", "[EOT]", "_<EOT>")
"""Names of tokens for the key `eot_token_id` (end of turn)."""

END_OF_MESSAGE = ("<|eom_id|>",)
"""Names of tokens for the key `eom_token_id` (end of message)."""


def add_metadata(writer: Any, source: ModelDescription) -> None:
    """Add the metadata of the model and its tokenizer to a `gguf.GGUFWriter`."""
    import gguf

    if source.gguf is None:
        _add(writer, f"{writer.arch}.", model_keys(source))
        _add(writer, "", {"general.name": source.name, **tokenizer_keys(source)})
        return
    for field in gguf.GGUFReader(source.gguf.path).fields.values():
        if not field.name.startswith(OF_THE_FILE):
            of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=of)


def _add(writer: Any, above: str, keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        kind = type(value)
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[kind]
        add(above + key, value)


def model_keys(source: ModelDescription) -> dict[str, Any]:
    """Keys that describe a folder's model, without the architecture's prefix."""
    spec, found = source.spec, dict[str, Any]()
    layer = spec.layers[0]
    found |= {
        "block_count": spec.num_layers,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "vocab_size": spec.vocab_size,
    }
    mlp = layer.mlp
    if isinstance(mlp, MoESpec):
        found |= {
            "expert_count": mlp.num_experts,
            "expert_used_count": mlp.num_experts_per_token,
            "expert_feed_forward_length": mlp.expert.intermediate_size,
        }
        if mlp.shared is not None:
            found["expert_shared_feed_forward_length"] = mlp.shared.mlp.intermediate_size
    inner = mlp.expert if isinstance(mlp, MoESpec) else mlp
    if inner is not None:
        found["feed_forward_length"] = inner.intermediate_size
    a = layer.attention
    if isinstance(a, AttentionSpec):
        found |= {
            "attention.head_count": a.num_heads,
            "attention.head_count_kv": a.num_kv_heads,
            "attention.key_length": a.head_dim,
            "attention.value_length": a.head_dim,
        }
        rotated = [
            x.position
            for layer in spec.layers
            if isinstance(x := layer.attention, AttentionSpec) and isinstance(x.position, RopeSpec)
        ]
        if rotated:
            full = max(rotated, key=lambda rope: rope.theta)
            found |= {"rope.dimension_count": full.rotary_dim, "rope.freq_base": full.theta}
        windows = {
            x.window for each in spec.layers if isinstance(x := each.attention, AttentionSpec)
        }
        if window := next((w for w in windows if w is not None), None):
            found["attention.sliding_window"] = window
    if (norm := spec.final_norm) is not None:
        kind = "layer_norm_rms_epsilon" if norm.kind == "rms" else "layer_norm_epsilon"
        found[f"attention.{kind}"] = norm.eps
    return found


def frequencies(source: ModelDescription) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """Divisors of a folder's rotary frequencies, which llama.cpp stores as a tensor (Llama 3.1);
    None if there is no such scaling, or if the source is a GGUF file, which has the tensor."""
    a = source.spec.layers[0].attention
    rope = a.position if isinstance(a, AttentionSpec) else None
    if source.gguf is not None or not isinstance(rope, RopeSpec):
        return None
    if not isinstance(rope.scaling, Llama3Scaling):
        return None
    s, half = rope.scaling, rope.rotary_dim // 2
    base = rope.theta ** -(np.arange(half) / half)
    turns = s.original_max_position * base / (2 * np.pi)
    smooth = (turns - s.low_freq_factor) / max(s.high_freq_factor - s.low_freq_factor, 1e-30)
    kept: np.ndarray[Any, Any] = smooth.clip(0, 1)
    return np.asarray(1 / ((1 - kept) / s.factor + kept), np.float32)


def tokenizer_keys(source: ModelDescription) -> dict[str, Any]:
    """Keys of a folder's tokenizer. UnsupportedModelError unless it is byte-level BPE whose
    pre-tokenizer has a name in GGUF."""
    backend, special, templates = read_folder(source.path)
    data = json.loads(backend.to_str())
    model = data["model"]
    if model["type"] != "BPE" or "ByteLevel" not in json.dumps(data["decoder"]):
        raise _unwritten(source, "only BPE over bytes is written yet")
    whole = bool(model.get("ignore_merges"))
    names = [
        name
        for name, split in SPLITS.items()
        if split.whole_tokens == whole and _splits_alike(backend.pre_tokenizer, split.patterns)
    ]
    if not names:
        raise _unwritten(source, "its way to split text has no name in GGUF")
    if kept := _normalizers(data.get("normalizer")):
        if kept != {"NFC"}:
            shown = ", ".join(sorted(kept))
            raise _unwritten(source, f"its normalizer ({shown}) has no form in GGUF")
        _logger.warning(
            "%s: its tokenizer composes letters and marks (NFC) before it splits; GGUF can't say so, and "
            "who reads the file gets other tokens for text that is not composed",
            source.name,
        )
    vocab = backend.get_vocab(with_added_tokens=True)
    texts = {i: text for text, i in vocab.items()}
    added = {t["id"]: t["special"] for t in data["added_tokens"]}
    size = source.spec.vocab_size
    kinds = [
        Kind.UNUSED
        if i not in texts
        else Kind.NORMAL
        if i not in added
        else Kind.CONTROL
        if added[i]
        else Kind.USER_DEFINED
        for i in range(size)
    ]
    merges = [line if isinstance(line, str) else " ".join(line) for line in model["merges"]]
    found: dict[str, Any] = {
        "model": "gpt2",
        "pre": names[0],
        "tokens": [texts.get(i, f"[PAD{i}]") for i in range(size)],
        "token_type": [int(kind) for kind in kinds],
        "merges": merges,
        "add_bos_token": bool(special.prefix),
    }
    if special.bos_id is not None:
        found["bos_token_id"] = special.bos_id
    ends = source.eos_token_ids or special.eos_ids
    main = vocab.get(str(special.texts.get("eos_token")))
    found |= {f"{name}_token_id": i for name, i in numbered_ends(source, ends, main, texts).items()}
    found["add_eos_token"] = bool(special.suffix)
    for key, name in (("padding", "pad_token"), ("unknown", "unk_token")):
        if (text := special.texts.get(name)) in vocab:
            found[f"{key}_token_id"] = vocab[str(text)]
    keys = {f"tokenizer.ggml.{name}": value for name, value in found.items()}
    for name, text in templates.items():
        keys["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = text
    return keys


def numbered_ends(
    source: ModelDescription, ends: Sequence[int], main: int | None, texts: Mapping[int, str]
) -> dict[str, int]:
    """Keys for the end tokens that are given by id. `main` is the tokenizer's own end token.

    `eot` and `eom` are chosen by the tokens' names. Readers recognize some other end tokens by
    name; one without such a name takes a key that is free, or whose token is recognized by name.
    UnsupportedModelError if there is none.
    """
    if not ends:
        return {}
    found = {"eos": main if main in ends and main is not None else ends[0]}
    for key, names in (("eot", END_OF_TURN), ("eom", END_OF_MESSAGE)):
        if (own := next((i for i in ends if texts.get(i) in names), None)) is not None:
            found[key] = own
    for i in ends:
        if i in found.values() or texts.get(i) in END_NAMES:
            continue
        free = [key for key in ("eot", "eom") if key not in found]
        free += [key for key in ("eot", "eom") if texts.get(found.get(key, -1)) in END_NAMES]
        if not free:
            raise UnsupportedModelError(
                f"{source.name}: token {i} ({texts.get(i)!r}) ends answers, and GGUF has no number left for it "
                f"beside {found}. Take it out of eos_token_id in generation_config.json, or another recipe",
                field="eos_token_id",
            )
        found[free[0]] = i
    return found


def _normalizers(found: Any) -> set[str]:
    """Types of normalizers in a tokenizer.json, with sequences flattened."""
    if not found:
        return set()
    if found["type"] == "Sequence":
        return set().union(*map(_normalizers, found["normalizers"]))
    return {found["type"]}


def _unwritten(source: ModelDescription, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source.name}: the tokenizer can't be written into a GGUF file: {why}. Start from a GGUF file of the model in F16 or "
        "BF16, or take another recipe",
        field="tokenizer",
    )


def _splits_alike(theirs: Any, patterns: Iterable[str]) -> bool:
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    ours = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return theirs is not None and all(
        ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text) for text in PROBES
    )


def same_model(source: ModelDescription, written: ModelDescription) -> bool:
    """Whether a written file describes the same model and tokenizer: its tokens, end tokens and
    chat templates. The file may have more end tokens, which GGUF readers recognize by name."""
    if not _same(source.spec, dataclasses.replace(written.spec, family=source.spec.family)):
        return False
    if source.gguf is not None:
        return True
    ours, theirs = Tokenizer.for_model(source), Tokenizer.for_model(written)
    own, read = source.eos_token_ids or ours.eos_token_ids, theirs.eos_token_ids
    if more := [f"{theirs.id_to_token(i)}" for i in read if i not in own]:
        _logger.warning(
            "%s: %s will end answers of the GGUF file, too: its readers know ends by such names",
            source.name,
            ", ".join(more),
        )
    return (
        set(own) <= set(read)
        and ours.bos_token_id == theirs.bos_token_id
        and (ours.chat_template, ours.tool_template) == (theirs.chat_template, theirs.tool_template)
        and all(ours.encode(text) == theirs.encode(text) for text in SAMPLES)
    )


def _same(a: Any, b: Any) -> bool:
    """Whether two specs' values are equal; floats within the precision that the file stores."""
    if isinstance(a, RopeSpec) and isinstance(b, RopeSpec):
        return (a.style, a.rotary_dim, a.sections) == (b.style, b.rotary_dim, b.sections) and bool(
            np.allclose(rope_angles(a, 64), rope_angles(b, 64), atol=1e-4)
        )
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(np.float32(a) == np.float32(b)) if isinstance(a, float) else bool(a == b)
