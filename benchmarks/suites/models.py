"""The models that stand for those of other servers' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.hub import resolve_model

FIM = {
    b"<issue_closed>": b"<|fim_prefix|>",
    b"<jupyter_text>": b"<|fim_suffix|>",
    b"<jupyter_code>": b"<|fim_middle|>",
}
"""Special tokens of SmolLM2 that it never writes, and their names in a model that fills in."""


def build(folder: Path) -> dict[str, str]:
    """Paths by kind; what is made is kept in `folder`."""
    text, embedding = Path(resolve_model("smollm2")), Path(resolve_model("minilm"))
    made = {"text": text, "embedding": embedding}
    made |= {kind: folder / kind for kind in ("reranker", "classifier", "vision")}
    made["infill"] = folder / "infill.gguf"
    if not made["infill"].exists():
        folder.mkdir(parents=True, exist_ok=True)
        heads(embedding, folder)
        from tests.support.vision_models import build_vision

        build_vision(made["vision"], "gemma3")
        content = text.read_bytes()
        head, rest = content[: 16 << 20], content[16 << 20 :]
        for old, new in FIM.items():
            assert old in head
            head = head.replace(old, new)
        made["infill"].write_bytes(head + rest)
    return {kind: str(path) for kind, path in made.items()}


def heads(embedding: Path, folder: Path) -> None:
    """MiniLM with a head of random weights: a cross-encoder of one score, and a classifier of two labels."""
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(embedding)
    kinds: dict[str, dict[str, Any]] = {
        "reranker": {"num_labels": 1},
        "classifier": {
            "id2label": {0: "Default", 1: "Spoiled"},
            "label2id": {"Default": 0, "Spoiled": 1},
        },
    }
    for kind, options in kinds.items():
        torch.manual_seed(0)
        kind_of = transformers.AutoModelForSequenceClassification
        kind_of.from_pretrained(embedding, **options).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
