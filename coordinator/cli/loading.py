"""`model-boss load|unload`: telling a running broker what should be in memory. Registered by the package's `app`."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coordinator.cli.link import ConfigOption, JsonOption, Link, LinkError, UrlOption, connect, quoted
from coordinator.cli.output import about, harmless, print_json, say
from coordinator.cli.status import ModelArgument

_LOOK_S = 0.25
"""Between two looks at how far a load is."""


def load(model: ModelArgument, url: UrlOption = None, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Load a model and wait until it is ready; it queues for its memory like any request."""
    link = connect(url, config)
    answer = _wish(link, model, "load", f"waiting for {model}")
    if json:
        print_json(answer)
        return
    with link.reading():
        load_s, queue_s = answer["load_ms"] / 1000, answer["queue_ms"] / 1000
        took = f"loaded in {load_s:.2f} s, {queue_s:.2f} s altogether" if load_s else "it was loaded already"
        say(f"{answer['model']} is {answer['state']} ({took})")


def unload(model: ModelArgument, url: UrlOption = None, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Take a model out of memory; its requests in flight finish first, those that wait for it are refused."""
    link = connect(url, config)
    answer = _wish(link, model, "unload", f"unloading {model}")
    if json:
        print_json(answer)
        return
    with link.reading():
        is_out = answer["state"] == "idle"
        say(f"{answer['model']} is {'not loaded now' if is_out else answer['state']}")


def _wish(link: Link, model: str, verb: str, text: str) -> Any:
    """POST, with a spinner that tells how far it is. Ends the command when the broker refuses."""
    path = f"/api/v1/models/{quoted(model)}"
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            results.put(link.post(f"{path}/{verb}"))
        except LinkError as error:
            results.put(error)

    # A daemon: Ctrl-C ends the command at once, and the broker sees the connection close and gives up the place.
    threading.Thread(target=ask, name=verb, daemon=True).start()
    with _spinner(text) as tell:
        while True:
            try:
                result = results.get(timeout=_LOOK_S)
                break
            except queue.Empty:
                with link.reading():
                    tell(_progress(link, model, text))
    if isinstance(result, LinkError):
        result.end()
    return result


def _progress(link: Link, model: str, text: str) -> str:
    try:
        slots = [slot for slot in link.get("/api/v1/slots")["slots"] if slot["model"] == model]
        waiting = link.get("/api/v1/queue")["queue"]
    except LinkError:
        return text
    loading = next((slot for slot in slots if slot["state"] == "loading"), None)
    ticket = next((entry for entry in waiting if entry["model"] == model), None)
    if loading is not None:
        fraction = loading["load_fraction"]
        return f"{model} is loading" + (f" {fraction:.0%}" if fraction is not None else "")
    if ticket is not None:
        eta = f", {about(ticket['eta_s'])}" if ticket["eta_s"] is not None else ""
        return f"{model} waits for memory, place {ticket['position']} of {len(waiting)}{eta}"
    return f"{model} is {slots[0]['state']}" if slots else text


@contextmanager
def _spinner(text: str) -> Iterator[Any]:
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(harmless(text))) as status:
        yield lambda text: status.update(Text(harmless(text)))
