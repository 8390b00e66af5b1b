"""What decides how much memory a model's engine takes: the name under which peaks are learned.

Called by `model_maker.py` (what was this model seen to take?) and `learned.py` (it took so much).
"""

from __future__ import annotations

import hashlib
import json

from inference.model import Model

__all__ = ["profile_of"]


def profile_of(model: Model, kind: str) -> str:
    """A model, its file, all that is asked of its engine, and the kind of device; never its claim.

    `<model id>@<16 hex digits>`: whatever changes one of them begins to learn anew.
    """
    facts = {
        "backend": model.backend,
        "file": model.file_bytes,
        "projector": str(model.mmproj or ""),
        "context": model.context,
        "parallel": model.parallel,
        "gpu_layers": model.gpu_layers,
        "options": dict(model.options),
        "arguments": model.extra_args,
        "environment": dict(model.env),
        "device": kind,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{model.id}@{hashlib.sha256(text.encode()).hexdigest()[:16]}"
