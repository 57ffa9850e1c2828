"""Encoders and encoder-decoders against transformers in float32, on tiny random models; and how texts are pooled.

The measure is max |ours − theirs| / max |theirs| over all tokens; 1e-4 leaves room for another order of float32 sums.
"""

from __future__ import annotations

import json
import random

import pytest
import torch
import transformers
from transformers import AutoConfig

from slipstream.errors import UnsupportedModelError
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.model.encoder import normalized, pool
from slipstream.spec.description import read_spec
from slipstream.spec.parameters import parameters
from tests.model.harness import is_program, load, states, written
from tests.support import tiny_models

OPS = ReferenceOps()
KERNELS = ["reference", "cpu", "torch"]
_rng = random.Random(3)
TEXTS = [[_rng.randrange(5, tiny_models.VOCAB) for _ in range(n)] for n in (5, 1, 70, 16, 17)]


def error(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def texts_of(hidden):
    """(all states, where each text's begin)"""
    return torch.cat(hidden), torch.tensor([0, *(len(text) for text in hidden)]).cumsum(0)


@pytest.mark.parametrize("family", tiny_models.ENCODERS)
def test_states_equal_transformers(family, tmp_path):
    theirs = tiny_models.build_encoder(tmp_path, family)
    for kernels in KERNELS:
        model = load(tmp_path, kernels=kernels)
        for text, ours in zip(TEXTS, states(model, TEXTS), strict=True):
            with torch.no_grad():
                assert error(ours, theirs(torch.tensor([text])).last_hidden_state[0]) <= 1e-4
    spec = read_spec(tmp_path).spec
    assert spec.is_encoder
    unread = ("pooler", "encoder.embed_positions")  # sines
    read = [p.numel() for name, p in theirs.named_parameters() if not name.startswith(unread)]
    assert (
        spec.num_parameters
        == sum(read)
        == sum(torch.Size(s).numel() for s in parameters(spec).values())
    )
    assert (
        spec.kv_bytes_per_token(4) == 2 * spec.layers[0].attention.kv_size * 4
    )  # one layer's, for the time of a step


@pytest.mark.parametrize("family", tiny_models.SCORING)
def test_scores_of_pairs_equal_transformers(family, tmp_path):
    theirs = tiny_models.build_encoder(tmp_path, family, num_labels=3)
    num_first = [2, 1, 30, 15, 1] if family == "bert" else [len(t) for t in TEXTS]
    for kernels in ("reference", "cpu"):
        model = load(tmp_path, kernels=kernels)
        assert model.decoder.classifier is not None
        scores = model.decoder.classifier(
            model.decoder.ops, *texts_of(states(model, TEXTS, num_first))
        )
        for text, n, ours in zip(TEXTS, num_first, scores, strict=True):
            types = (
                {}
                if family != "bert"
                else {"token_type_ids": (torch.arange(len(text)) >= n).long()[None]}
            )
            with torch.no_grad():
                assert error(ours, theirs(torch.tensor([text]), **types).logits[0]) <= 1e-4


AUTHORS = {
    "nomic_bert": {
        **dict(
            model_type="nomic_bert",
            architectures=["NomicBertModel"],
            vocab_size=tiny_models.VOCAB,
            n_embd=32,
            n_head=4,
        ),
        **dict(
            n_layer=2,
            n_inner=64,
            n_positions=200,
            activation_function="swiglu",
            layer_norm_epsilon=1e-12,
            prenorm=False,
        ),
        **dict(
            rotary_emb_base=1000,
            rotary_emb_fraction=1.0,
            rotary_emb_interleaved=False,
            rotary_emb_scale_base=None,
        ),
        **dict(
            qkv_proj_bias=False,
            mlp_fc1_bias=False,
            mlp_fc2_bias=False,
            causal=False,
            parallel_block=False,
        ),
        **dict(
            use_rms_norm=False,
            type_vocab_size=2,
            scale_attn_weights=True,
            use_flash_attn=True,
            max_trained_positions=64,
        ),
    },
    "gte": {
        **dict(
            model_type="new",
            architectures=["NewModel"],
            vocab_size=tiny_models.VOCAB,
            hidden_size=32,
            hidden_act="gelu",
        ),
        **dict(
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=200,
            pack_qkv=True,
        ),
        **dict(
            rope_theta=160000,
            layer_norm_eps=1e-12,
            layer_norm_type="layer_norm",
            position_embedding_type="rope",
        ),
        **dict(
            type_vocab_size=2,
            logn_attention_scale=False,
            logn_attention_clip1=False,
            unpad_inputs=False,
        ),
    },
    "modernbert": {
        **dict(
            model_type="modernbert",
            architectures=["ModernBertForMaskedLM"],
            vocab_size=tiny_models.VOCAB,
            hidden_size=32,
        ),
        **dict(
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_activation="gelu",
            norm_eps=1e-5,
        ),
        **dict(
            layer_norm_eps=1e-5,
            norm_bias=True,
            local_attention=12,
            global_attn_every_n_layers=3,
            decoder_bias=True,
        ),
        **dict(
            global_rope_theta=160000.0,
            local_rope_theta=10000.0,
            position_embedding_type="absolute",
            mlp_bias=False,
        ),
        **dict(
            max_position_embeddings=200,
            classifier_pooling="mean",
            classifier_activation="gelu",
            sparse_prediction=False,
        ),
    },
}


@pytest.mark.parametrize("family", list(AUTHORS))
def test_the_authors_configs_say_the_same(family, tmp_path):
    """Configs of the hub that name code of their own are read without it."""
    tiny_models.build_encoder(tmp_path, family)
    expected = torch.cat(states(load(tmp_path), TEXTS))
    (tmp_path / "config.json").write_text(json.dumps(AUTHORS[family]))
    assert torch.equal(torch.cat(states(load(tmp_path), TEXTS)), expected)


@pytest.mark.parametrize(("pooling", "bias"), [("mean", True), ("cls", False)])
def test_a_classifier_of_means(pooling, bias, tmp_path):
    theirs = tiny_models.build_encoder(
        tmp_path, "modernbert", num_labels=1, classifier_pooling=pooling, classifier_bias=bias
    )
    model = load(tmp_path, kernels="cpu")
    scores = model.decoder.classifier(model.decoder.ops, *texts_of(states(model, TEXTS)))
    for text, ours in zip(TEXTS, scores, strict=True):
        with torch.no_grad():
            assert error(ours, theirs(torch.tensor([text])).logits[0]) <= 1e-4
    assert model.spec.num_parameters == sum(p.numel() for p in theirs.parameters())


def require_equal_logits(folder, theirs, answers):
    """One mixed step has encoder texts and answers of different lengths, one token and many."""
    order = sorted(range(len(answers)), key=lambda i: len(answers[i]) != 1)
    texts, answers = [TEXTS[i] for i in order], [answers[i] for i in order]
    for kernels in KERNELS:
        model = load(folder, kernels=kernels)
        assert kernels != "cpu" or is_program(model.decoder)
        found = written(model, texts, answers)
        for text, answer, ours in zip(texts, answers, found, strict=True):
            with torch.no_grad():
                expected = theirs(
                    input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([answer])
                ).logits[0]
            assert error(ours, expected) <= 1e-4
    return model.spec


@pytest.mark.parametrize("family", tiny_models.T5S)
@pytest.mark.parametrize("shared", [False, True])
def test_t5_logits_equal_transformers(family, shared, tmp_path):
    theirs = tiny_models.build_t5(tmp_path, family)
    if shared:  # newer writers share the table of 1.1 too
        theirs.tie_weights()
        theirs.lm_head.weight = theirs.shared.weight
        theirs.save_pretrained(tmp_path)
    answers = [[0, 7, 9], [0], [0, *TEXTS[2][:40]], [0], TEXTS[3][:2]]
    spec = require_equal_logits(tmp_path, theirs, answers)
    assert spec.num_parameters == sum(p.numel() for p in theirs.parameters())
    assert spec.num_parameters == sum(torch.Size(s).numel() for s in parameters(spec).values())


@pytest.mark.parametrize("family", tiny_models.BARTS)
def test_barts_logits_equal_transformers(family, tmp_path):
    theirs = tiny_models.build_bart(tmp_path, family)
    answers = [[2, 7, 9], [2], [2, *TEXTS[2][:40]], [2], TEXTS[3][:2]]
    spec = require_equal_logits(tmp_path, theirs, answers)
    sines = "embed_positions"
    own = sum(p.numel() for n, p in theirs.named_parameters() if p.requires_grad or sines not in n)
    biases = 0 if family == "m2m_100" else tiny_models.VOCAB
    assert spec.num_parameters == own + biases


OLD = {
    **dict(activation_dropout=0.0, attention_dropout=0.0, dropout=0.1, add_bias_logits=False, classif_dropout=0.0),
    **dict(is_encoder_decoder=True, num_beams=4, max_length=142, min_length=56, no_repeat_ngram_size=3, use_cache=True),
    **dict(early_stopping=True, length_penalty=2.0, gradient_checkpointing=False, forced_eos_token_id=2, eos_token_id=2),
}  # fmt: skip


def bart_config(kind, vocab, width, layers, heads, inner, **more):
    encoder, decoder = layers
    sizes = dict(encoder_layers=encoder, decoder_layers=decoder, num_hidden_layers=encoder)
    sizes |= {f"{side}_attention_heads": heads for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": inner for side in ("encoder", "decoder")}
    architecture = tiny_models.BARTS[kind]
    own = dict(model_type=kind, architectures=[architecture], vocab_size=vocab, d_model=width)
    return {**OLD, **own, **sizes, "decoder_start_token_id": 2, "pad_token_id": 1, **more}


def norms(before, embedding, sines, final):
    return dict(
        normalize_before=before,
        normalize_embedding=embedding,
        static_position_embeddings=sines,
        add_final_layer_norm=final,
    )


PUBLISHED = {  # as their authors wrote them
    "bart-large-cnn": bart_config(
        "bart", 50264, 1024, (12, 12), 16, 4096,
        forced_bos_token_id=0, **norms(False, True, False, False),
    ),
    "opus-mt-en-de": bart_config(
        "marian", 58101, 512, (6, 6), 8, 2048,
        scale_embedding=True, activation_function="swish", **norms(False, False, True, False),
    ),
    "nllb-200-distilled-600M": bart_config(
        "m2m_100", 256206, 1024, (12, 12), 16, 4096, scale_embedding=True, encoder_layerdrop=0,
    ),
    "mbart-large-50": bart_config(
        "mbart", 250054, 1024, (12, 12), 16, 4096,
        scale_embedding=True, **norms(True, True, False, True),
    ),
    "pegasus-xsum": bart_config(
        "pegasus", 96103, 1024, (16, 16), 16, 4096,
        scale_embedding=True, activation_function="relu", max_position_embeddings=512, extra_pos_embeddings=1,
        **norms(True, False, True, True),
    ),
    "blenderbot-400M-distill": bart_config(
        "blenderbot", 8008, 1280, (2, 12), 32, 5120,
        scale_embedding=True, max_position_embeddings=128, layernorm_variant="prelayernorm",
        encoder_no_repeat_ngram_size=3, **norms(True, False, False, True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_barts_published_configs_are_read(name, tmp_path):
    config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path).spec
    with torch.device("meta"):
        own = AutoConfig.for_model(**config)
        theirs = getattr(transformers, config["architectures"][0])(own)
    sines = "embed_positions" if spec.encoder.positions is None else "nothing"
    counted = {id(p): p.numel() for n, p in theirs.named_parameters() if sines not in n}
    assert spec.num_parameters == sum(counted.values()) + spec.head_bias * spec.vocab_size
    assert spec.encoder.forced == ((0,) if name == "bart-large-cnn" else ())
    for wrong, field in (
        ({"decoder_attention_heads": 4}, "decoder_attention_heads"),
        ({"normalize_before": spec.final_norm is None}, "normalize_before"),
        ({"decoder_vocab_size": 7}, "decoder_vocab_size"),
        ({"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings"),
        ({"num_experts": 4}, "num_experts"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["BartForSequenceClassification"]}, "architectures"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(UnsupportedModelError) as caught:
            read_spec(tmp_path)
        assert caught.value.field == field


# --- Pooling ------------------------------------------------------------------------------------------------------------


def test_pool_and_normalize():
    hidden = torch.randn(9, 4)
    starts = torch.tensor([0, 1, 6, 9], dtype=torch.int32)
    parts = hidden.split([1, 5, 3])
    assert torch.allclose(
        pool(OPS, hidden, starts, "mean"), torch.stack([p.mean(0) for p in parts]), atol=1e-6
    )
    assert torch.equal(pool(OPS, hidden, starts, "cls"), torch.stack([p[0] for p in parts]))
    assert torch.equal(pool(OPS, hidden, starts, "last"), torch.stack([p[-1] for p in parts]))
    assert torch.allclose(normalized(hidden).norm(dim=1), torch.ones(9))


def test_pooling_is_read_from_the_files(tmp_path):
    tiny_models.build_encoder(tmp_path)
    plain = read_spec(tmp_path).pooling
    assert (plain.kind, plain.normalize, plain.max_length, plain.dimensions) == (
        "mean",
        True,
        None,
        None,
    )
    tiny_models.write_sentence_transformers(tmp_path, mode="cls_token", normalize=False)
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "query: ", "none": ""}, "default_prompt_name": "query"})
    )
    edit(tmp_path / "config.json", matryoshka_dimensions=[8, 16])
    found = read_spec(tmp_path).pooling
    assert (found.kind, found.normalize, found.max_length, found.prompt) == (
        "cls",
        False,
        64,
        "query: ",
    )
    assert found.dimensions == (8, 16)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("file", "changes", "field"),
    [
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "pooling_mode_mean_tokens"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("config.json", {"is_decoder": True}, "is_decoder"),
        (
            "config.json",
            {"sbert_ce_default_activation_function": "torch.nn.Softmax"},
            "activation_fn",
        ),
        ("config.json", {"architectures": ["BertForQuestionAnswering"]}, "architectures"),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_name(tmp_path, file, changes, field):
    tiny_models.build_encoder(tmp_path)
    tiny_models.write_sentence_transformers(tmp_path)
    edit(tmp_path / file, **changes)
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == field


def test_a_step_that_is_not_known_is_refused(tmp_path):
    tiny_models.build_encoder(tmp_path)
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}])
    )
    with pytest.raises(UnsupportedModelError, match="Dense"):
        read_spec(tmp_path)
