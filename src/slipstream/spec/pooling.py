"""How a text's token states are pooled to one vector or score, read from sentence-transformers' files. No
torch.

1. `modules.json` lists the steps: Transformer, Pooling (the mean of all tokens, the first, or the
   last), Dense (EmbeddingGemma has two), Normalize. An unknown step or order raises an error.
2. A language model that scores pairs (Qwen3-Reranker) has the step LogitScore. The chat template formats
   query and document as a prompt; the score is computed from the logits of one or two tokens after it.
3. Without `modules.json` encoders pool the mean and decoders the last token, and vectors are normalized.
4. A cross-encoder's scores are probabilities unless its config says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from slipstream.base.files import parse_json
from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.spec.stored.safetensors import file_shapes, find_tensor

DenseActivation: TypeAlias = Literal["identity", "tanh", "relu", "sigmoid"]

Problem: TypeAlias = Literal["multi_label", "single_label", "regression"]

CONFIG_KEYS = frozenset(
    (
        "is_matryoshka",
        "matryoshka_dimensions",
        "sbert_ce_default_activation_function",
        "sentence_transformers",
    )
)
"""Keys of config.json that this module reads, not the family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseStep:
    """A linear layer on vectors: act(x · weightᵀ + bias). `folder` (or file) holds its weights,
    whose names begin with `name`."""

    folder: Path
    name: str = "linear"
    num_inputs: int
    num_outputs: int
    bias: bool
    activation: DenseActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class LateSpec:
    """Late interaction (ColBERT, Khattab and Zaharia 2020): each token of queries and documents has a vector.
    The score is MaxSim: the sum, over the query's tokens, of the largest dot product with a document token.

    A prefix precedes the text. With `inserts_prefix` (PyLate, the original code) it is inserted as one token,
    if the vocabulary has it, after the initial special tokens. Lengths are in tokens, special ones included;
    longer texts are truncated. `skipped`: document tokens that get no vector. `expands`: the model was
    trained with queries padded with [MASK] tokens, which is not done here.
    """

    query_prefix: str = ""
    document_prefix: str = ""
    inserts_prefix: bool = False
    query_length: int | None = None
    document_length: int | None = None
    skipped: tuple[str, ...] = ()
    expands: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """How a text becomes a vector or a score.

    - `max_length`: maximum tokens of a text in sentence-transformers, which truncates longer ones.
      None: no limit, a limit above the model's positions, or a model that generates text.
    - `prompt`: precedes every text.
    - `dimensions`: lengths to which vectors may be truncated (Matryoshka); empty: any length; None:
      truncation is not supported.
    - `probabilities`: a sigmoid is applied to a classifier's scores.
    - `score_tokens`: a pair's score is the logit of the first token, minus that of the second if
      there is one.
    - `labels`: names of a classifier's scores, if its config has them. `problem`: how scores become
      probabilities: sigmoid of each (`multi_label`), softmax (`single_label`), or not at all
      (`regression`). None: softmax for several labels; for one label `probabilities` decides.
    - `dense`: linear layers on the pooled vectors, before they are normalized.
    - `kind` `tokens`: each token has a vector, and there is none for the whole text (ColBERT).
    - `token_dense`: linear layers on the tokens' vectors. `without_first`: the first token gets no
      vector (bge-m3).
    - `late`: how queries and documents differ for MaxSim.
    - `lexical`: a linear layer that computes a weight for each token (bge-m3's sparse vectors).
    """

    kind: Literal["mean", "cls", "last", "tokens"]
    normalize: bool
    max_length: int | None = None
    prompt: str = ""
    dimensions: tuple[int, ...] | None = None
    probabilities: bool = True
    score_tokens: tuple[int, int | None] | None = None
    dense: tuple[DenseStep, ...] = ()
    labels: tuple[str, ...] = ()
    problem: Problem | None = None
    token_dense: tuple[DenseStep, ...] = ()
    without_first: bool = False
    late: LateSpec | None = None
    lexical: DenseStep | None = None

    def vector_size(self, hidden_size: int) -> int:
        """Number of elements of a vector."""
        return self.dense[-1].num_outputs if self.dense else hidden_size

    def token_size(self, hidden_size: int) -> int:
        """Size of a token's vector."""
        return self.token_dense[-1].num_outputs if self.token_dense else hidden_size


LAST_TOKEN = PoolingSpec(kind="last", normalize=True)


def read_pooling(path: Path, config: Mapping[str, Any], *, is_encoder: bool) -> PoolingSpec:
    """How the model in the folder `path`, whose config.json is `config`, pools texts.
    UnsupportedModelError names what is unknown."""
    kind: Literal["mean", "cls", "last", "tokens"] = "mean" if is_encoder else "last"
    normalize, score_tokens, dense = True, None, list[DenseStep]()
    modules = _json(path / "modules.json", [])
    says = _json(path / "config_sentence_transformers.json", {})
    late = _late(path, config, modules, says) if is_encoder else None
    if late is not None:
        kind, dense = "tokens", _token_steps(path, modules)
    elif modules:
        normalize = False
        for module in modules:
            name, folder = _name_of(module), _inside(module)
            if name in ("Pooling", "Dense") and normalize:
                raise UnsupportedModelError(
                    f"modules.json: the step {name} comes after Normalize; only the order Pooling, Dense, Normalize is "
                    "supported",
                    field="modules.json",
                )
            if name == "Dense":
                dense.append(_dense(path / folder, dense[-1] if dense else None))
            elif name == "Pooling":
                kind = _kind(_json(path / folder / "config.json", {}))
            elif name == "Normalize":
                normalize = True
            elif name == "LogitScore" and not is_encoder:
                kind, score_tokens = "last", _score_tokens(_json(path / folder / "config.json", {}))
            elif name != "Transformer":
                raise UnsupportedModelError(
                    f"modules.json: the step {name!r} is not supported", field="modules.json"
                )
    file = next((name for name in _LIMITS if (path / name).is_file()), _LIMITS[0])
    limits = _json(path / file, {})
    if limits.get("do_lower_case"):
        raise UnsupportedModelError(
            f"{file}: do_lower_case is not supported", field="do_lower_case"
        )
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    is_read = (modules and score_tokens is None) or architecture.endswith("SequenceClassification")
    default = says.get("default_prompt_name")
    listed = config.get("matryoshka_dimensions")
    return PoolingSpec(
        kind=kind,
        normalize=normalize,
        max_length=_max_length(path, limits, file) if is_encoder or is_read else None,
        prompt=str((says.get("prompts") or {}).get(default, "")) if default else "",
        dimensions=tuple(listed) if listed else () if config.get("is_matryoshka") else None,
        probabilities=_probabilities({**says, **config} if "activation_fn" in says else config),
        score_tokens=score_tokens,
        dense=() if kind == "tokens" else tuple(dense),
        token_dense=_token_dense(path, config, dense if late else []) if is_encoder else (),
        without_first=is_encoder and late is None and (path / COLBERT_NAME).is_file(),
        late=late,
        lexical=_product(path / SPARSE_NAME, "relu") if is_encoder else None,
        labels=_labels(config),
        problem=_problem(config),
    )


SPARSE_NAME, COLBERT_NAME = "sparse_linear.safetensors", "colbert_linear.safetensors"
"""Files of bge-m3's heads for sparse vectors and for token vectors."""

PUNCTUATION = tuple("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def _late(
    path: Path, config: Mapping[str, Any], modules: list[Any], says: Mapping[str, Any]
) -> LateSpec | None:
    """Late interaction of a ColBERT model in the format of the original code (`HF_ColBERT`), PyLate
    or sentence-transformers. None for other models."""
    if "HF_ColBERT" in (config.get("architectures") or ()):
        own = _json(path / "artifact.metadata", {})
        return LateSpec(
            query_prefix=str(own.get("query_token_id") or "[unused0]"),
            document_prefix=str(own.get("doc_token_id") or "[unused1]"),
            inserts_prefix=True,
            query_length=int(own.get("query_maxlen") or 32),
            document_length=int(own.get("doc_maxlen") or 220),
            skipped=PUNCTUATION if own.get("mask_punctuation", True) else (),
            expands=True,
        )
    masks = [m for m in modules if _name_of(m) == "MultiVectorMask"]
    if says.get("model_type") not in ("ColBERT", "MultiVectorEncoder") and not masks:
        return None
    mask = _json(path / str(masks[0].get("path", "")) / "config.json", {}) if masks else says
    if tasks := set(mask.get("skiplist_tasks") or ["document"]) - {"document"}:
        what = f"a MultiVectorMask step with skiplist_tasks for {sorted(tasks)[0]!r}: only documents' tokens are skipped"
        raise UnsupportedModelError(what, field="skiplist_tasks")
    if mask.get("keep_only_token_ids"):
        raise UnsupportedModelError(
            "a MultiVectorMask step with keep_only_token_ids is not supported",
            field="keep_only_token_ids",
        )
    prompts = says.get("prompts") or {}
    knobs = {**says, **_json(path / "sentence_bert_config.json", {})}
    skipped = mask.get("skiplist_words")
    return LateSpec(
        query_prefix=str(says.get("query_prefix") or prompts.get("query") or ""),
        document_prefix=str(says.get("document_prefix") or prompts.get("document") or ""),
        inserts_prefix="query_prefix" in says or "document_prefix" in says,
        query_length=knobs.get("query_length"),
        document_length=knobs.get("document_length"),
        skipped=PUNCTUATION if skipped is None and not masks else tuple(skipped or ()),
        expands=knobs.get("query_expansion") is not None
        or (says.get("model_type") == "ColBERT" and says.get("do_query_expansion") is not False),
    )


def _name_of(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rsplit(".", 1)[-1]


def _token_steps(path: Path, modules: list[Any]) -> list[DenseStep]:
    """The Dense steps of a ColBERT model. Its vectors are always normalized, with or without a Normalize step."""
    found: list[DenseStep] = []
    for module in modules:
        name, folder = _name_of(module), _inside(module)
        if name == "Dense":
            found.append(_dense(path / folder, found[-1] if found else None, of_tokens=True))
        elif name not in ("Transformer", "MultiVectorMask", "Normalize"):
            raise UnsupportedModelError(
                f"modules.json: the step {name!r} is not supported", field="modules.json"
            )
    return found


def _inside(module: Mapping[str, Any]) -> Path:
    """Folder of a step. CheckpointError if it is outside the model's folder."""
    folder = Path(str(module.get("path", "")))
    if folder.is_absolute() or ".." in folder.parts:
        what = f"modules.json: the path {str(folder)!r} is outside the model's folder"
        raise CheckpointError(what, field="modules.json")
    return folder


def _token_dense(
    path: Path, config: Mapping[str, Any], dense: list[DenseStep]
) -> tuple[DenseStep, ...]:
    """Linear layers on tokens' vectors: the Dense steps, or `linear` among the weights of an original ColBERT, or
    bge-m3's."""
    if dense:
        return tuple(dense)
    if "HF_ColBERT" in (config.get("architectures") or ()):
        stored = find_tensor(path, "linear.weight")
        if stored is None or len(stored.shape) != 2:
            raise CheckpointError(
                f"{path} lacks linear.weight, by which ColBERT shortens vectors",
                field="linear.weight",
            )
        num_outputs, num_inputs = stored.shape
        head = DenseStep(
            folder=path,
            bias=False,
            activation="identity",
            num_inputs=num_inputs,
            num_outputs=num_outputs,
        )
        return (head,)
    own_head = _product(path / COLBERT_NAME, "identity")
    return () if own_head is None else (own_head,)


def _product(file: Path, activation: DenseActivation) -> DenseStep | None:
    """Reads a linear layer from a safetensors file with its weight and bias; None if the file
    doesn't exist."""
    if not file.is_file():
        return None
    shapes = file_shapes(file)
    if len(shape := shapes.get("weight", ())) != 2:
        raise CheckpointError(f"{file.name} has no matrix 'weight'", field=file.name)
    sizes: dict[str, Any] = dict(num_inputs=shape[1], num_outputs=shape[0])
    has_bias = "bias" in shapes
    return DenseStep(folder=file, name="", bias=has_bias, activation=activation, **sizes)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label")
    if not isinstance(named, Mapping):
        return ()
    return tuple(str(named.get(str(i), named.get(i, f"LABEL_{i}"))) for i in range(len(named)))


def _problem(config: Mapping[str, Any]) -> Problem | None:
    """How a classifier's scores become probabilities, from `problem_type`. UnsupportedModelError for an unknown value."""
    said = config.get("problem_type")
    known: dict[Any, Problem | None] = {
        None: None,
        "regression": "regression",
        "single_label_classification": "single_label",
        "multi_label_classification": "multi_label",
    }
    if isinstance(said, (list, dict)) or said not in known:
        names = ", ".join(name for name in known if name)
        raise UnsupportedModelError(
            f"problem_type = {said!r} is none of {names}", field="problem_type"
        )
    return known[said]


def _dense(folder: Path, before: DenseStep | None, *, of_tokens: bool = False) -> DenseStep:
    """Reads a Dense step. UnsupportedModelError names an unknown key or value of its config."""
    config = _json(folder / "config.json", {})
    sizes = [config.get(name) for name in ("in_features", "out_features")]
    if any(not isinstance(n, int) or isinstance(n, bool) or not 0 < n < 2**20 for n in sizes):
        raise UnsupportedModelError(
            f"a Dense step with in_features, out_features = {sizes}", field="in_features"
        )
    if before is not None and before.num_outputs != sizes[0]:
        raise CheckpointError(
            f"a Dense step reads {sizes[0]} numbers, and the one before it gives {before.num_outputs}",
            field="in_features",
        )
    given = ("token_embeddings", "sentence_embedding") if of_tokens else ("sentence_embedding",)
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (*given, None):
            raise UnsupportedModelError(
                f"a Dense step with {name} = {config[name]!r}: only {given[0]} are supported here",
                field=name,
            )
    if config.get("use_residual"):
        raise UnsupportedModelError(
            "a Dense step with use_residual is not supported", field="use_residual"
        )
    said = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = str(said).rsplit(".", 1)[-1].removesuffix("()").lower()
    if activation not in get_args(DenseActivation):
        raise UnsupportedModelError(
            f"a Dense step with the activation {said!r}: there are {', '.join(get_args(DenseActivation))}",
            field="activation_function",
        )
    return DenseStep(
        folder=folder,
        num_inputs=sizes[0],
        num_outputs=sizes[1],
        bias=config.get("bias", True) is not False,
        activation=activation,  # type: ignore[arg-type]
    )


_LIMITS = ("sentence_bert_config.json", *(
    f"sentence_{kind}_config.json"
    for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
))  # fmt: skip
"""Files in which versions of sentence-transformers store the Transformer step's arguments. The
first existing one is used."""


def _max_length(path: Path, limits: Mapping[str, Any], file: str) -> int | None:
    """The maximum length of a text in tokens, from the first source that has one.

    The sources are: arguments of the processor, arguments of the tokenizer, `max_seq_length` of
    versions before 6, and the tokenizer's own `model_max_length`.
    """
    reading = limits.get("processing_kwargs") or {}
    said: list[Any] = []
    for kind in ("text", "common"):
        own = reading.get(kind) or {}
        if unknown := sorted(set(own) - {"max_length", "truncation", "padding"}):
            raise UnsupportedModelError(
                f"{file}: processing_kwargs.{kind}.{unknown[0]} is not supported", field=unknown[0]
            )
        said.append(own.get("max_length"))
    given = limits.get("processor_kwargs") or limits.get("tokenizer_args") or {}
    said += [given.get("model_max_length"), limits.get("max_seq_length")]
    said.append(_json(path / "tokenizer_config.json", {}).get("model_max_length"))
    lengths = [n for n in said if isinstance(n, (int, float)) and not isinstance(n, bool)]
    return int(lengths[0]) if lengths and 0 < lengths[0] < 2**31 else None


def _score_tokens(config: Mapping[str, Any]) -> tuple[int, int | None]:
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(yes, int) or not (no is None or isinstance(no, int)) or min(yes, no or 0) < 0:
        raise UnsupportedModelError(
            f"a LogitScore step with true_token_id = {yes!r} and false_token_id = {no!r}",
            field="true_token_id",
        )
    return yes, no


def gguf_pooling(number: object, *, is_encoder: bool) -> PoolingSpec:
    """The pooling for llama.cpp's `pooling_type`: 1 mean, 2 first token, 3 last token; 0 or None the default."""
    kinds: dict[object, Literal["mean", "cls", "last"]] = {1: "mean", 2: "cls", 3: "last"}
    usual: Literal["mean", "last"] = "mean" if is_encoder else "last"
    if number not in (None, 0, *kinds):
        raise UnsupportedModelError(
            f"pooling_type = {number!r}: only 0 to 3 are supported", field="pooling_type"
        )
    return PoolingSpec(kind=kinds.get(number, usual), normalize=True)


def gguf_dense(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[DenseStep, ...]:
    """EmbeddingGemma's Dense steps: `dense_2` and `dense_3` among the tensors of the file `path`."""
    found: list[DenseStep] = []
    for name in ("dense_2", "dense_3"):
        shape = shapes.get(f"{name}.weight")
        if shape is None:
            continue
        if len(shape) != 2 or (found and found[-1].num_outputs != shape[1]):
            raise CheckpointError(
                f"{path.name}: {name}.weight has the shape {list(shape)}", field=f"{name}.weight"
            )
        sizes: dict[str, Any] = dict(num_inputs=shape[1], num_outputs=shape[0])
        found.append(DenseStep(folder=path, name=name, bias=False, activation="identity", **sizes))
    return tuple(found)


def _kind(config: Mapping[str, Any]) -> Literal["mean", "cls", "last"]:
    """The single pooling mode that a Pooling step's config enables."""
    modes: dict[str, Literal["mean", "cls", "last"]] = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_lasttoken": "last",
    }
    named = config.get("pooling_mode")
    named = named[0] if isinstance(named, list) and len(named) == 1 else named
    on = (
        [f"pooling_mode_{named}"]
        if named
        else [k for k, v in config.items() if k.startswith("pooling_mode_") and v]
    )
    found = [
        kind
        for key, kind in modes.items()
        if on == [key] or named == kind or (named == "lasttoken" and kind == "last")
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"a Pooling step with {' and '.join(on) or 'no mode'}: only one of {', '.join(modes)} is supported",
            field=on[0] if on else "pooling_mode_mean_tokens",
        )
    if config.get("include_prompt") is False:
        raise UnsupportedModelError(
            "a Pooling step that leaves the prompt out is not supported", field="include_prompt"
        )
    return found[0]


def _probabilities(config: Mapping[str, Any]) -> bool:
    """Whether a cross-encoder's scores pass through Sigmoid (the default) rather than Identity."""
    own = config.get("sentence_transformers")
    name = (
        (own.get("activation_fn") if isinstance(own, Mapping) else None)
        or config.get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    last = str(name or "Sigmoid").rsplit(".", 1)[-1].removesuffix("()")
    if last not in ("Sigmoid", "Identity"):
        raise UnsupportedModelError(
            f"the activation {name!r} of scores is not supported", field="activation_fn"
        )
    return last == "Sigmoid"


def _json(path: Path, default: Any) -> Any:
    """Content of a JSON file, which must have the type of `default`; `default` if the file doesn't exist."""
    if not path.is_file():
        return default
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", field=path.name) from error
    if not isinstance(value, type(default)):
        raise CheckpointError(
            f"{path} must hold {'a list' if default == [] else 'an object'}", field=path.name
        )
    return value
