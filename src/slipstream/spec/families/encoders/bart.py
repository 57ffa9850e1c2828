"""BART (Lewis et al. 2020) and its kin: mBART, PLBART, Marian, Pegasus, M2M-100 and NLLB, Blenderbot.

All are encoder-decoders with layer norms and biases. They differ in where the norms are, and in their positions:

| | norms | positions | norm of the embeddings |
| --- | --- | --- | --- |
| bart, plbart | after | a table of each stack | yes |
| mbart | before | a table of each stack | yes |
| blenderbot | before | a table of each stack | no |
| pegasus, m2m_100 | before | sines | no |
| marian | after | sines | no |
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import activation, layer_norm
from slipstream.spec.families.encoders.whisper import WHISPER, both_layers
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.model import EncoderSpec, LearnedPositionSpec, ModelSpec, SinusoidSpec
from slipstream.spec.parameters import OneRow

UNUSED = (
    "num_hidden_layers", "encoder_layerdrop", "decoder_layerdrop", "max_length", "min_length", "num_beams", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "early_stopping", "force_bos_token_to_be_generated",
    "extra_pos_embeddings", "classif_dropout", "save_step", "do_blenderbot_90_layernorm",
)  # fmt: skip
"""Keys of training, keys that repeat what the model type says, and generation keys, which `spec.generation` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BartKind:
    """Differences between model types, shown in the table above. `offset`: table row of the first position. `longest`,
    `act`, `scaled` and `start`: defaults of max_position_embeddings, activation_function, scale_embedding and
    decoder_start_token_id."""

    before: bool  # norms precede attention and MLP, and there is a final norm
    embed_norm: bool = False
    sines: bool = False
    offset: int = 0
    far: bool = True  # the lowest frequency of the sines is 1/10000
    act: str = "gelu"
    longest: int = 1024
    scaled: bool = False
    bias: bool = True  # the output head has a bias
    start: int | None = None


KINDS = {
    "bart": BartKind(before=False, embed_norm=True, offset=2, start=2),
    "plbart": BartKind(before=False, embed_norm=True, offset=2, scaled=True),
    "mbart": BartKind(before=True, embed_norm=True, offset=2),
    "blenderbot": BartKind(before=True, longest=128, start=1),
    "pegasus": BartKind(before=True, sines=True, far=False, start=0),
    "marian": BartKind(before=False, sines=True, far=False, start=58100),
    "m2m_100": BartKind(before=True, sines=True, act="relu", scaled=True, bias=False, start=2),
}


def read(c: ConfigReader, *, family: str) -> ModelSpec:
    kind = KINDS[family]
    c.require("is_encoder_decoder", True)
    c.require("is_decoder", False)
    c.ignore(*UNUSED)
    c.require_all(normalize_before=kind.before, add_final_layer_norm=kind.before)
    c.require_all(normalize_embedding=kind.embed_norm, static_position_embeddings=kind.sines)
    c.require_all(share_encoder_decoder_embeddings=True, add_bias_logits=False)
    c.require_all(
        extra_layer_norm=False, layernorm_variant="prelayernorm" if kind.before else "xlm"
    )
    hidden, vocab = c.size("d_model"), c.size("vocab_size")
    c.require("decoder_vocab_size", vocab)
    norm, act = layer_norm(hidden, 1e-5), activation(c, "activation_function", kind.act)
    reader, writer = both_layers(c, act, norm, norms_first=kind.before)
    longest = c.size("max_position_embeddings", kind.longest)
    pad = c.take("pad_token_id", int, 1)
    # the first position follows the padding token's row
    offset = pad + 1 if family == "m2m_100" else kind.offset
    rows = longest + offset
    positions: LearnedPositionSpec | SinusoidSpec = LearnedPositionSpec(
        num_positions=rows, offset=offset
    )
    if kind.sines:
        positions = SinusoidSpec(num_positions=rows, offset=offset, far=kind.far)
    final_norm, embed_norm = norm if kind.before else None, norm if kind.embed_norm else None
    spec = ModelSpec(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        max_position=longest,
        layers=(writer,) * c.size("decoder_layers"),
        final_norm=final_norm,
        learned_positions=positions,
        embed_scale=hidden**0.5 if c.take("scale_embedding", bool, kind.scaled) else 1.0,
        embed_norm=embed_norm,
        tied_embeddings=c.take("tie_word_embeddings", bool, True),
        head_bias=kind.bias,
        encoder=EncoderSpec(
            layers=(reader,) * c.size("encoder_layers"),
            final_norm=final_norm,
            start_token_id=c.take("decoder_start_token_id", int, kind.start),
            positions=None if isinstance(positions, SinusoidSpec) else positions,
            embed_norm=embed_norm,
        ),
    )
    c.finish()
    return spec


def _post(side: str) -> dict[str, Theirs]:
    return {f"{side}attention_norm": "self_attn_layer_norm", f"{side}mlp_norm": "final_layer_norm"}


BART: dict[str, Theirs] = {
    **WHISPER,
    "embed": "model.shared",
    "embed_norm": "model.decoder.layernorm_embedding",
    "encoder.embed_norm": "model.encoder.layernorm_embedding",
    "head": {"weight": "lm_head.weight", "bias": "final_logits_bias"},
    "cross_norm": "encoder_attn_layer_norm",
    **_post(""),
    **_post("encoder."),
}
_table = table(BART, layer="model.decoder.layers.{i}.", encoder_layer="model.encoder.layers.{i}.")


def names(spec: ModelSpec) -> Names:
    """Table of tensor names. The head's bias is stored as a row vector."""
    found = _table(spec)
    if spec.head_bias:
        bias = found["final_logits_bias"]
        found["final_logits_bias"] = dataclasses.replace(bias, transform=OneRow())
    return found


COPIES = (r"model\.(en|de)coder\.embed_tokens\.weight", r"(en|de)coder\.version")
SINES = (r"model\.(en|de)coder\.embed_positions\.weights?",)

FAMILIES = tuple(
    Family(
        model_type=kind,
        architectures=(architecture,),
        read=partial(read, family=kind),
        names=names,
        ignored=(*COPIES, *(SINES if KINDS[kind].sines else ())),
    )
    for kind, architecture in (
        ("bart", "BartForConditionalGeneration"),
        ("plbart", "PLBartForConditionalGeneration"),
        ("mbart", "MBartForConditionalGeneration"),
        ("blenderbot", "BlenderbotForConditionalGeneration"),
        ("pegasus", "PegasusForConditionalGeneration"),
        ("marian", "MarianMTModel"),
        ("m2m_100", "M2M100ForConditionalGeneration"),
    )
)
