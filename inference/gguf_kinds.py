"""What a GGUF file is good for, told from its header.

Called by `model_maker.py`. Not every whole GGUF file is a model: adapters, projectors and bare vocabularies look
like one.
"""

from __future__ import annotations

from inference.gguf_header import GgufHeader
from inference.model import Category

_KINDS = {"adapter": "a LoRA adapter", "mmproj": "a vision projector", "imatrix": "an importance matrix"}
_ENCODERS = (
    "bert",
    "nomic-bert",
    "nomic-bert-moe",
    "jina-bert-v2",
    "jina-bert-v3",
    "modern-bert",
    "neo-bert",
    "eurobert",
)
_POOLING_RANK = 4


def not_servable(header: GgufHeader) -> str | None:
    """Why a whole GGUF file is nothing that answers requests, completing "<file name> ..."; None when it is a model."""
    kind = _KINDS.get(str(header.metadata.get("general.type")))
    if header.architecture == "clip":
        kind = _KINDS["mmproj"]
    if kind:
        return f"is {kind}, not a model"
    if not header.architecture:
        return "names no architecture: not a model"
    if header.vocabulary == 0:
        return f"holds no tokenizer (architecture {header.architecture!r}): not a language model"
    if header.tensor_count == 0:
        return "holds no tensors: a vocabulary, not a model"
    return None


def category_of(header: GgufHeader, *, has_projector: bool) -> Category:
    """What a model is for, as far as its file tells."""
    if has_projector:
        return Category.VISION
    pooling = header.number("pooling_type")
    if pooling == _POOLING_RANK:
        return Category.RERANK
    if pooling or header.architecture in _ENCODERS:
        return Category.EMBEDDING
    return Category.LLM
