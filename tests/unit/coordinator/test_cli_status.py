"""ps, models, load, unload and logs against a pretended broker, and without any."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app, output, status
from coordinator.cli.link import complete_model
from coordinator.cli.output import ExitCode
from tests.unit.coordinator.fake_broker import FakeBroker, fake_broker

GIB = 1 << 30
SLOT = {
    "model": "robin",
    "slot": "robin",
    "state": "ready",
    "pid": 4711,
    "shim_pid": 4710,
    "devices": {"sim0": 5 * GIB},
    "claim_bytes": 5 * GIB,
    "in_flight": 2,
    "load_fraction": None,
    "last_load_s": 0.05,
    "observed_bytes": {"sim0": 4 * GIB},
    "waiting": 0,
    "priority": "normal",
    "pin": False,
    "stays_s": 300.0,
    "leaves_for": None,
    "yields_to": None,
    "retry_s": None,
    "trouble": None,
}
TICKET = {
    "position": 1,
    "model": "wren",
    "priority": "normal",
    "counts_as": "normal",
    "client_id": None,
    "purpose": "infer",
    "waited_s": 0.4,
    "eta_s": 2.3,
    "kept_place": False,
}
DEVICE = {
    "id": "sim0",
    "kind": "sim",
    "total_bytes": 8 * GIB,
    "claimed_bytes": 5 * GIB,
    "foreign_bytes": GIB,
    "residual_bytes": 0,
    "free_bytes": 2 * GIB,
}
MODEL = {
    "id": "robin",
    "state": "ready",
    "problem": None,
    "manifest_problem": None,
    "never_fits": None,
    "context": 512,
    "size_bytes": 2 << 20,
    "claim_bytes": 5 * GIB,
    "source": "/srv/manifests/robin.yaml",
}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeBroker]:
    monkeypatch.chdir(tmp_path)
    for variable in ("MODEL_BOSS_API_KEY", "MODEL_BOSS_URL", "MODEL_BOSS_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    with fake_broker() as fake:
        fake.answers = {
            "GET /api/v1/slots": {"slots": [SLOT]},
            "GET /api/v1/queue": {"queue": [TICKET]},
            "GET /api/v1/devices": {"devices": [DEVICE]},
            "GET /api/v1/models": {"models": [MODEL]},
        }
        yield fake


def call(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result


def lines(result: Any) -> list[list[str]]:
    """The tab-separated cells of piped output."""
    return [line.split("\t") for line in result.stdout.splitlines()]


# -- ps ------------------------------------------------------------------------------------------------------------


def test_ps_shows_what_is_loaded_what_is_waited_for_and_the_devices(broker: FakeBroker) -> None:
    header, robin, wren, queue_header, ticket, device_header, device = lines(call("ps", "--url", broker.url))
    assert header[:7] == ["model", "state", "devices", "claimed", "used", "in flight", "waiting"]
    assert header[7:] == ["load s", "stays until", "pid", "note"]
    assert robin == ["robin", "ready", "sim0", "5GiB", "4GiB", "2", "0", "0.05", "in use", "4711", ""]
    waits = ["wren", "waiting", "-", "-", "-", "0", "1", "-", "-", "-", ""]
    assert wren == waits, "waited for, and without a slot yet"
    assert queue_header == ["place", "waits for", "priority", "client", "seconds", "its turn", "note"]
    assert ticket == ["1", "wren", "normal", "-", "0.4", "about 3 s", ""]
    assert device_header == ["device", "total", "claimed", "others", "free"]
    assert device == ["sim0", "8GiB", "5GiB", "1GiB", "2GiB"]


def test_ps_shows_how_far_a_load_is_and_leaves_out_idle_slots(broker: FakeBroker) -> None:
    loading = SLOT | {"state": "loading", "load_fraction": 0.42}
    broker.answers["GET /api/v1/slots"] = {"slots": [loading, SLOT | {"model": "old", "state": "idle", "devices": {}}]}
    broker.answers["GET /api/v1/queue"] = {"queue": []}
    result = call("ps", "--url", broker.url)
    assert lines(result)[1][1] == "loading 42%"
    assert "old" not in result.stdout


def test_ps_says_until_when_by_the_clock(broker: FakeBroker) -> None:
    slots = [
        SLOT | {"slot": "soon", "in_flight": 0},
        SLOT | {"slot": "pinned", "pin": True, "stays_s": None},
        SLOT | {"slot": "preloaded", "stays_s": None, "in_flight": 0},
        SLOT | {"slot": "later", "stays_s": 3 * 86400.0, "in_flight": 0},
    ]
    broker.answers |= {"GET /api/v1/slots": {"slots": slots}, "GET /api/v1/queue": {"queue": []}}
    soon, pinned, preloaded, later = (row[8] for row in lines(call("ps", "--url", broker.url))[1:5])
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d )?\d\d:\d\d(:\d\d)?", soon)
    assert (pinned, preloaded) == ("pinned", "-")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", later), "another day"


def test_ps_notes_who_leaves_for_whom_who_is_asked_to_yield_and_what_is_wrong(broker: FakeBroker) -> None:
    slots = [
        SLOT | {"slot": "leaving", "state": "draining", "leaves_for": "wren"},
        SLOT | {"slot": "asked", "yields_to": "job:sft"},
        SLOT | {"slot": "crashed", "state": "failed", "retry_s": 60.0, "trouble": "it crashed: status 139\nlast lines"},
        SLOT | {"slot": "stuck", "state": "wedged", "trouble": "SIGKILL does not end 4711"},
        SLOT | {"slot": "broken", "model": "broken", "state": "idle", "devices": {}, "trouble": "it cannot be read"},
    ]
    broker.answers |= {"GET /api/v1/slots": {"slots": slots}, "GET /api/v1/queue": {"queue": []}}
    notes = {row[0]: row[-1] for row in lines(call("ps", "--url", broker.url))[1:6]}
    assert notes["leaving"] == "leaves for wren"
    assert notes["asked"] == "asked to yield to job:sft"
    assert re.fullmatch(r"starts again at .*\d at the earliest; it crashed: status 139", notes["crashed"])
    assert notes["stuck"] == "SIGKILL does not end 4711"
    assert notes["broken"] == "it cannot be read", "shown although it is idle"


def test_ps_shows_what_has_aged_and_who_came_back_to_a_place(broker: FakeBroker) -> None:
    risen = TICKET | {"priority": "batch", "counts_as": "low", "client_id": "kitchen", "eta_s": None}
    broker.answers["GET /api/v1/queue"] = {"queue": [risen | {"kept_place": True}]}
    ticket = lines(call("ps", "--url", broker.url))[4]
    assert ticket == ["1", "wren", "batch, as low", "kitchen", "0.4", "-", "has its earlier place"]


def test_ps_says_when_nothing_is_loaded(broker: FakeBroker) -> None:
    broker.answers |= {"GET /api/v1/slots": {"slots": []}, "GET /api/v1/queue": {"queue": []}}
    assert "no model is loaded" in call("ps", "--url", broker.url).stdout


def test_ps_shows_the_rest_while_the_store_is_away(broker: FakeBroker) -> None:
    error = {"message": "the lease store does not answer", "code": "store_unavailable"}
    broker.answers["GET /api/v1/devices"] = (503, {"error": error})
    result = call("ps", "--url", broker.url)
    assert "robin" in result.stdout
    assert "the lease store does not answer" in result.stderr


def test_ps_as_json_holds_everything(broker: FakeBroker) -> None:
    shown = json.loads(call("ps", "--url", broker.url, "--json").stdout)
    assert shown == {"slots": [SLOT], "queue": [TICKET], "devices": [DEVICE], "external": [], "leases": []}


def test_ps_shows_who_uses_a_device_without_a_lease_by_pid(broker: FakeBroker) -> None:
    strangers = [{"pid": 812, "name": "blender", "bytes": GIB}, {"pid": 99, "name": "", "bytes": None}]
    broker.answers["GET /api/v1/devices"] = {"devices": [DEVICE | {"foreign": strangers}]}
    *_, header, blender, nameless = lines(call("ps", "--url", broker.url))
    assert header == ["without a lease", "pid", "device", "uses"]
    assert blender == ["blender", "812", "sim0", "1GiB"]
    assert nameless == ["-", "99", "sim0", "-"]


def test_ps_shows_who_else_holds_memory_or_waits_for_it(broker: FakeBroker) -> None:
    held = {"holder": "job:sft", "kind": "job", "state": "active", "priority": "batch", "devices": {"sim0": 3 * GIB}}
    held |= {"position": None, "notice": {"for": "slot:robin"}}
    waits = held | {"holder": "job:next", "state": "queued", "devices": {}, "position": 1, "notice": None}
    model = held | {"holder": "slot:robin", "kind": "slot", "notice": None}
    service = held | {"holder": "service:comfyui", "kind": "service", "notice": None}
    leases = [held, waits, model, service]
    broker.answers["GET /api/v1/devices"] = {"devices": [DEVICE], "leases": leases}
    *_, header, first, second, third = lines(call("ps", "--url", broker.url))
    assert header == ["leased to", "state", "priority", "devices", "claimed", "note"]
    assert first == ["job:sft", "active", "batch", "sim0", "3GiB", "asked to yield to slot:robin"]
    assert second == ["job:next", "queued, place 1", "batch", "-", "-", ""]
    assert third[0] == "service:comfyui", "adopted by somebody"
    assert json.loads(call("ps", "--url", broker.url, "--json").stdout)["leases"] == leases


def test_ps_shows_the_programs_beside_us_and_what_they_are_asked(broker: FakeBroker) -> None:
    comfy = {
        "name": "comfyui",
        "state": "held",
        "pid": 4712,
        "devices": {"sim0": 3 * GIB},
        "used_bytes": GIB,
        "busy": True,
        "notice": "job:sft",
        "problem": None,
    }
    absent = comfy | {"name": "vision", "state": "absent", "pid": None, "devices": {}, "used_bytes": None}
    absent |= {"busy": None, "notice": None, "problem": "POST http://127.0.0.1:1/free failed"}
    lease = {"holder": "service:comfyui", "kind": "service", "state": "active", "priority": "low", "position": None}
    lease |= {"devices": {"sim0": 3 * GIB}, "notice": None}
    broker.answers["GET /api/v1/devices"] = {"devices": [DEVICE], "external": [comfy, absent], "leases": [lease]}
    *_, header, first, second = lines(call("ps", "--url", broker.url))
    assert header == ["program", "state", "devices", "claimed", "used", "pid", "note"]
    assert first == ["comfyui", "held, busy", "sim0", "3GiB", "1GiB", "4712", "asked to yield to job:sft"]
    assert second == ["vision", "absent", "-", "-", "-", "-", "POST http://127.0.0.1:1/free failed"]


# -- models --------------------------------------------------------------------------------------------------------


def test_models_are_listed_with_the_reason_why_one_is_broken(broker: FakeBroker) -> None:
    broken = MODEL | {"id": "cut", "state": "idle", "problem": "cut.gguf is truncated", "context": 0}
    kept = MODEL | {"id": "kept", "manifest_problem": "kept.yaml:3: context: expected a whole number, got 'lots'"}
    large = MODEL | {"id": "large", "never_fits": "model 'large' needs 40GiB, but 'sim0' can hold 8GiB"}
    broker.answers["GET /api/v1/models"] = {"models": [MODEL, broken, kept, large]}
    _, robin, cut, old, never = lines(call("models", "--url", broker.url))
    assert robin == ["robin", "ready", "512", "2MiB", "5GiB", "/srv/manifests/robin.yaml", ""]
    assert (cut[1], cut[-1]) == ("broken", "cut.gguf is truncated")
    assert (old[1], old[-1]) == ("ready", "kept.yaml:3: context: expected a whole number, got 'lots'")
    assert never[-1] == "model 'large' needs 40GiB, but 'sim0' can hold 8GiB"
    assert json.loads(call("models", "--url", broker.url, "--json").stdout) == [MODEL, broken, kept, large]


def test_no_models_says_how_to_get_some(broker: FakeBroker) -> None:
    broker.answers["GET /api/v1/models"] = {"models": []}
    assert "models_dirs" in call("models", "--url", broker.url).stdout


# -- load, unload --------------------------------------------------------------------------------------------------


def test_load_waits_and_tells_how_long_it_took(broker: FakeBroker) -> None:
    answer = {"model": "robin", "state": "ready", "queue_ms": 2500, "load_ms": 50}
    broker.answers["POST /api/v1/models/robin/load"] = answer
    assert "robin is ready (loaded in 0.05 s, 2.50 s altogether)" in call("load", "robin", "--url", broker.url).stdout
    assert json.loads(call("load", "robin", "--url", broker.url, "--json").stdout) == answer
    broker.answers["POST /api/v1/models/robin/load"] = answer | {"load_ms": 0}
    assert "loaded already" in call("load", "robin", "--url", broker.url).stdout


def test_a_refusal_is_told_in_the_brokers_words(broker: FakeBroker) -> None:
    error = {"message": "model 'huge' claims 10 GiB; sim0 has 8 GiB", "code": "will_never_fit"}
    broker.answers["POST /api/v1/models/huge/load"] = (400, {"error": error})
    assert "claims 10 GiB" in call("load", "huge", "--url", broker.url, code=ExitCode.FAILED).stderr


def test_unload_tells_the_state_afterwards(broker: FakeBroker) -> None:
    broker.answers["POST /api/v1/models/robin/unload"] = {"model": "robin", "state": "idle"}
    assert "robin is not loaded now" in call("unload", "robin", "--url", broker.url).stdout


def test_ids_with_a_slash_reach_the_broker_whole(broker: FakeBroker) -> None:
    broker.answers["POST /api/v1/models/org/model%20x/unload"] = {"model": "org/model x", "state": "idle"}
    call("unload", "org/model x", "--url", broker.url)


# -- logs ----------------------------------------------------------------------------------------------------------


def test_logs_prints_the_lines_asked_for(broker: FakeBroker) -> None:
    broker.answers["GET /api/v1/models/robin/logs"] = {"model": "robin", "lines": ["one", "two"]}
    assert call("logs", "robin", "-n", "2", "--url", broker.url).stdout == "one\ntwo\n"
    assert broker.asked[-1].endswith("?lines=2")


def test_a_model_that_never_ran_has_no_log(broker: FakeBroker) -> None:
    broker.answers["GET /api/v1/models/robin/logs"] = {"model": "robin", "lines": []}
    assert "was not loaded" in call("logs", "robin", "--url", broker.url).stderr


def test_following_prints_what_is_added_and_ends_with_the_broker(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "FOLLOW_S", 0.01)
    windows = [["a"], ["a"], ["a", "b"], ["a", "b", "c"]]
    answers: list[Any] = [(200, {"model": "robin", "lines": window}) for window in windows]
    answers.append((503, {"error": {"message": "shutting down", "code": "shutting_down"}}))
    broker.answers["GET /api/v1/models/robin/logs"] = answers
    result = call("logs", "robin", "-f", "--url", broker.url, code=ExitCode.FAILED)
    assert result.stdout == "a\nb\nc\n"
    assert "shutting down" in result.stderr


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        ([], ["a"], ["a"]),
        (["a"], ["a"], []),
        (["a", "b"], ["b", "c"], ["c"]),
        (["a", "a"], ["a", "a", "a"], ["a"]),
        (["a", "b"], ["x", "y"], ["x", "y"]),
    ],
)
def test_what_was_added_to_a_window(before: list[str], now: list[str], new: list[str]) -> None:
    assert status.added(before, now) == new


# -- who answers ---------------------------------------------------------------------------------------------------


def test_nobody_there_names_the_address_and_how_to_start_one(broker: FakeBroker) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    for command in (["ps"], ["models"], ["load", "x"], ["unload", "x"], ["logs", "x"]):
        result = call(*command, "--url", url, code=ExitCode.NO_BROKER)
        assert url in result.stderr
        assert "model-boss serve" in result.stderr


@pytest.mark.parametrize("answer", [(200, b"<html>"), (500, b"oops"), (404, {"detail": "x"}), (404, [])])
def test_something_else_there_is_told(broker: FakeBroker, answer: tuple[int, Any]) -> None:
    broker.answers["GET /api/v1/models"] = answer
    assert "not Model Boss" in call("models", "--url", broker.url, code=ExitCode.NO_BROKER).stderr


def test_the_address_comes_from_the_configuration(
    broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = broker.url.rpartition(":")[2]
    (tmp_path / "model-boss.yaml").write_text(f"port: {port}\n")
    call("models")
    (tmp_path / "other.yaml").write_text(f"port: {port}\nhost: 0.0.0.0\n")
    call("models", "--config", "other.yaml")
    monkeypatch.setenv("MODEL_BOSS_URL", f"{broker.url}/")
    (tmp_path / "model-boss.yaml").write_text("port: 1\n")
    call("models")
    assert broker.asked == ["GET /api/v1/models"] * 3


def test_the_key_is_sent_and_its_absence_explained(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"message": "the API key is missing", "code": "invalid_api_key"}
    broker.answers["GET /api/v1/models"] = (401, {"error": error})
    assert "MODEL_BOSS_API_KEY" in call("models", "--url", broker.url, code=ExitCode.FAILED).stderr
    monkeypatch.setenv("MODEL_BOSS_API_KEY", "secret")
    call("models", "--url", broker.url, code=ExitCode.FAILED)
    assert broker.keys == [None, "Bearer secret"]


def test_a_proxy_in_the_environment_is_not_asked(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    call("models", "--url", broker.url)


_COMMANDS = (("ps",), ("explain", "x"), ("models",), ("load", "x"), ("unload", "x"), ("logs", "x"))
_DEEP = b"[" * 60_000
_ENDPOINTS = (
    *("GET /api/v1/slots", "GET /api/v1/queue", "GET /api/v1/devices", "GET /api/v1/models", "GET /api/v1/explain"),
    *("POST /api/v1/models/x/load", "POST /api/v1/models/x/unload", "GET /api/v1/models/x/logs"),
)


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda command: str(command[0]))
@pytest.mark.parametrize(
    "answer", [{}, {"hello": "world"}, [], [1], "text", 5, _DEEP], ids=lambda answer: str(answer)[:9]
)
def test_other_json_there_is_told_in_a_sentence(broker: FakeBroker, command: tuple[str, ...], answer: Any) -> None:
    broker.answers = dict.fromkeys(_ENDPOINTS, (200, answer))
    result = call(*command, "--url", broker.url, code=ExitCode.NO_BROKER)
    assert f"what answers at {broker.url} is not Model Boss" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": [{}]},
        {"slots": 5},
        {"slots": [SLOT | {"devices": {"sim0": "much"}}]},
        {"slots": [SLOT | {"slot": 5}]},
        {"slots": [SLOT | {"stays_s": 1e17, "in_flight": 0}]},
        {"slots": [SLOT | {"stays_s": 1e300, "in_flight": 0}]},
        {"queue": [TICKET | {"eta_s": "soon"}]},
        {"queue": [TICKET | {"eta_s": float("inf")}]},
        {"queue": [None]},
        {"devices": [DEVICE | {"foreign_bytes": None}]},
        {"leases": [5]},
    ],
)
def test_answers_that_are_ours_but_for_a_part_are_told_in_a_sentence(
    broker: FakeBroker, changes: dict[str, Any]
) -> None:
    for name in ("slots", "queue", "devices"):
        whole = broker.answers[f"GET /api/v1/{name}"]
        broker.answers[f"GET /api/v1/{name}"] = whole | {
            key: changes[key] for key in changes if key in (name, "leases")
        }
    result = call("ps", "--url", broker.url, code=ExitCode.NO_BROKER)
    assert "is not Model Boss, or another version of it" in result.stderr


NASTY = "\x1b]0;owned\x07\x1b[2J\nfake\t\x9b[/red] :smile:"


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_of_an_answer_do_not_reach_the_terminal(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(output, "_on_terminal", lambda: terminal)
    broker.answers |= {
        "GET /api/v1/slots": {"slots": [SLOT | {"slot": NASTY, "trouble": NASTY, "leaves_for": NASTY}]},
        "GET /api/v1/queue": {"queue": [TICKET | {"model": NASTY, "client_id": NASTY}]},
        "GET /api/v1/models": {"models": [MODEL | {"id": NASTY, "problem": NASTY}]},
        "POST /api/v1/models/x/load": {"model": NASTY, "state": NASTY, "queue_ms": 1, "load_ms": 1},
        "POST /api/v1/models/x/unload": {"model": NASTY, "state": NASTY},
        "GET /api/v1/models/x/logs": {"model": NASTY, "lines": [NASTY]},
    }
    for command in _COMMANDS:
        if command[0] != "explain":
            told = call(*command, "--url", broker.url).output
            assert not [letter for letter in told if not letter.isprintable() and letter not in "\n\t"]
            assert "owned" in told
    error = {"message": NASTY, "code": "x"}
    broker.answers["GET /api/v1/devices"] = broker.answers["GET /api/v1/models"] = (503, {"error": error})
    for command, code in ((("ps",), 0), (("models",), ExitCode.FAILED)):
        told = call(*command, "--url", broker.url, code=code).stderr
        assert "owned" in told
        assert "\x1b]" not in told
        assert "\x07" not in told


def test_a_name_makes_neither_a_row_nor_a_column_of_piped_output(broker: FakeBroker) -> None:
    broker.answers["GET /api/v1/queue"] = {"queue": [TICKET | {"client_id": "a\tb\nc"}]}
    assert lines(call("ps", "--url", broker.url))[4][3] == "a b c"


def test_completion_is_silent_where_somebody_else_answers(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_BOSS_URL", broker.url)
    for answer in ({}, [], {"models": [{}]}, {"models": 5}):
        broker.answers["GET /api/v1/models"] = (200, answer)
        assert complete_model("ro") == []
    broker.answers["GET /api/v1/models"] = {"models": [MODEL, MODEL | {"id": "ro\x1b[2J"}]}
    assert complete_model("ro") == ["robin"]


def test_what_cannot_be_sent_is_wrong_usage(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be sent" in call("ps", "--url", f"http://{'a' * 70}.x", code=ExitCode.USAGE).stderr
    monkeypatch.setenv("MODEL_BOSS_API_KEY", "se\ncret")
    told = call("ps", "--url", broker.url, code=ExitCode.USAGE).stderr
    assert "MODEL_BOSS_API_KEY" in told
    assert "cret" not in told, "a key is not repeated"


def test_a_name_that_is_no_text_reaches_the_broker_as_its_bytes(broker: FakeBroker) -> None:
    call("unload", "\udcff", "--url", broker.url, code=ExitCode.FAILED)
    call("explain", "\udcff", "--url", broker.url, code=ExitCode.FAILED)
    assert broker.asked[0] == "POST /api/v1/models/%FF/unload"
    assert broker.asked[1].startswith("GET /api/v1/explain?model=%FF&")


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8210", "ftp://x", "nonsense", "http://", "http://[::1", "http://[x]", "http://x:port"),
        *("http://x:99999", "http://x:0", "http://:8210", "http://a b", "http://\x1b[2J"),
    ],
)
def test_an_address_that_is_none_is_wrong_usage(broker: FakeBroker, url: str) -> None:
    told = call("ps", "--url", url, code=ExitCode.USAGE).stderr
    assert "http://127.0.0.1:8210" in told
    assert "\x1b[2J" not in told


def test_waiting_for_a_load_ends_no_other_thread(broker: FakeBroker) -> None:
    broker.answers["POST /api/v1/models/robin/load"] = {"model": "robin", "state": "ready", "queue_ms": 1, "load_ms": 1}
    call("load", "robin", "--url", broker.url)
    assert not [thread for thread in threading.enumerate() if thread.name == "load"]
