"""The endpoints that bypass FastAPI because they lie on the way to an engine: one table. Called by `app.py`."""

from __future__ import annotations

from typing import Any

from coordinator.api.infer import Infer
from coordinator.api.passthrough import UPSTREAM_PREFIX, Look, Upstream
from coordinator.broker import Broker
from coordinator.front import Handler, RawRoutes
from coordinator.openapi import RawEndpoint
from inference.events import Purpose

_CHAT = {"model": "MODEL", "messages": [{"role": "user", "content": "Who are you?"}], "stream": True}
_TEXT = {"model": "MODEL", "content": "some text"}


def endpoints(broker: Broker) -> tuple[RawEndpoint, ...]:
    """All of them, as `/docs` lists them."""

    def infer(path: str, summary: str, example: dict[str, Any], purpose: Purpose = Purpose.INFER) -> RawEndpoint:
        return RawEndpoint("POST", path, Infer(broker, path, purpose), summary, example)

    return (
        infer("/v1/chat/completions", "Chat (OpenAI), streamed or not", _CHAT),
        infer("/v1/completions", "Completion of a text (OpenAI)", {"model": "MODEL", "prompt": "Once"}),
        infer("/v1/embeddings", "Vectors for texts (OpenAI)", {"model": "MODEL", "input": ["one", "two"]}),
        infer("/v1/rerank", "Scores for documents", {"model": "MODEL", "query": "q", "documents": ["one", "two"]}),
        infer("/tokenize", "Tokens of a text; loads into free room only", _TEXT, Purpose.PEEK),
        infer("/detokenize", "Text of tokens", {"model": "MODEL", "tokens": [1, 2]}, Purpose.PEEK),
        infer("/apply-template", "The prompt that a chat becomes", _CHAT, Purpose.PEEK),
        RawEndpoint("GET", "/props", Look(broker, "/props"), "Properties of a loaded engine", by_query=True),
        RawEndpoint("GET", "/slots", Look(broker, "/slots"), "What a loaded engine works on", by_query=True),
        RawEndpoint("POST", f"{UPSTREAM_PREFIX}{{model}}/{{path}}", Upstream(broker), "What its engine answers", {}),
    )


def routes(table: tuple[RawEndpoint, ...]) -> RawRoutes:
    """The same for the front: exact paths by look-up, a path with a parameter by what stands before it, any method."""
    exact: dict[str, dict[str, Handler]] = {}
    prefixes: dict[str, Handler] = {}
    for endpoint in table:
        fixed, parameter, _ = endpoint.path.partition("{")
        if parameter:
            prefixes[fixed] = endpoint.handler
        else:
            exact.setdefault(fixed, {})[endpoint.method] = endpoint.handler
    return RawRoutes(exact, prefixes)
