"""Bodies of embeddings, classes, pooling, reranking and scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from slipstream.server.http.decoding import register
from slipstream.server.http.errors import bad_request
from slipstream.server.openai.messages import (
    Message,
    Prompted,
    PromptString,
    each_prompt,
    without_objects,
)
from slipstream.server.openai.protocol import Int, Text, TokenId

MAX_INPUTS = 2048  # texts in one request (OpenAI's limit)
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class Pooled(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of embeddings, reranking and scores, with vLLM's extensions."""

    model: str | None = None  # default: the first served name
    truncate_prompt_tokens: Int | None = None  # cut longer texts to this; -1: to the model's limit
    priority: Int | None = None  # lower numbers go first
    # Cached prefixes are shared only with requests that have the same salt.
    cache_salt: Text | None = None
    user: str | None = None  # no effect


class Inputs(Pooled, forbid_unknown_fields=True, kw_only=True):
    """Base of embeddings, classes and pooling: texts, or vLLM's `messages`, which the chat template
    formats as one text."""

    input: (
        str
        | PromptString
        | Annotated[
            list[str | TokenId | PromptString | list[str | TokenId]], Meta(max_length=MAX_INPUTS)
        ]
        | None
    ) = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_generation_prompt: bool = False  # for messages, as the next two
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # default: true for texts, false for messages

    def prompts(self) -> list[Prompted]:
        """A list with one entry for each text of `input`."""
        if self.input is None or self.messages is not None:
            raise bad_request("give either input or messages", "input")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(self, name):
                raise bad_request(f"{name} is for messages; leave it out", name)
        return each_prompt(without_objects(self.input, "input"), "input")


class EmbeddingRequest(Inputs, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings: texts as vectors, in OpenAI's format"""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None


class ClassifyRequest(Inputs, forbid_unknown_fields=True, kw_only=True):
    """POST /classify and /v1/classify: vLLM's format. With `use_activation` false the scores are logits."""

    use_activation: bool | None = None


class PoolingRequest(Inputs, forbid_unknown_fields=True, kw_only=True):
    """POST /pooling and /v1/pooling: vLLM's format. A vector per text or per token, or the raw
    scores of a classifier or reward model"""

    encoding_format: Literal["float", "base64"] = "float"
    task: str | None = None  # vLLM's names: embed, classify, score, token_embed, token_classify
    # Whether texts are queries or documents, for late-interaction models. None: no prefix is added.
    input_type: Literal["query", "document"] | None = None


class SparseRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /embed_sparse: TEI's format"""

    inputs: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    truncate: bool = False
    prompt_name: None = None
    truncation_direction: Literal["right", "Right"] = "right"
    model: str | None = None
    priority: Int | None = None
    cache_salt: Text | None = None
    user: str | None = None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return -1 if self.truncate else None


class TextDocument(Struct, forbid_unknown_fields=True, kw_only=True):
    text: str


class RerankRequest(Pooled, forbid_unknown_fields=True, kw_only=True):
    """POST /rerank, /v1/rerank and /v2/rerank: in Jina's and Cohere's format, or with `texts` in TEI's"""

    query: str
    documents: Annotated[list[str | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS)] = []
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    # Cohere's; longer texts are truncated. 0: no truncation
    max_tokens_per_doc: Annotated[int, Meta(ge=0)] = 0
    use_activation: bool | None = None  # vLLM's; false: scores are a classifier's logits
    texts: Texts | None = None  # TEI's, as the next four
    return_text: bool = False
    truncate: bool = False
    truncation_direction: Literal["right", "Right"] = "right"
    raw_scores: bool = False

    def given(self) -> tuple[str, list[str]]:
        """The name of the field with the documents, and their texts."""
        if bool(self.documents) == (self.texts is not None):
            raise bad_request("give either documents or texts", "documents")
        if self.texts is not None:
            return "texts", self.texts
        return "documents", [d if isinstance(d, str) else d.text for d in self.documents]


class ScoreRequest(Pooled, forbid_unknown_fields=True, kw_only=True):
    """POST /score and /v1/score: in vLLM's format; one `text_1` goes with all of `text_2`. Its other names for them are
    `queries` and `documents` (or `items`), and `data_1` and `data_2`"""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
    items: str | Texts | None = None
    use_activation: bool | None = None

    def names(self) -> tuple[str, str]:
        """The names of the two fields that are given."""
        pairs = (
            *(("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")),
            ("queries", "items"),
        )
        named = dict.fromkeys(name for pair in pairs for name in pair)
        given = [name for name in named if getattr(self, name) is not None]
        if len(given) == 1:
            missing = next(
                other for a, b in pairs for own, other in ((a, b), (b, a)) if own == given[0]
            )
            raise bad_request(f"{missing} is missing; it goes with {given[0]}", missing)
        if tuple(given) not in pairs:
            raise bad_request("give text_1 and text_2, or queries and documents", "text_1")
        return given[0], given[1]


class CohereEmbedRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v2/embed: Cohere's format"""

    model: str | None = None
    texts: Texts
    # No effect: no text is added before the input.
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering"] | None
    ) = None
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    output_dimension: Int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    priority: Int | None = None
    cache_salt: Text | None = None
    user: str | None = None


register(
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    ClassifyRequest,
    PoolingRequest,
    SparseRequest,
    CohereEmbedRequest,
)
