"""Random histories of a ledger by the hundred: no room and no fence is given twice, and everything is given back.

Each protection that the scripts rest on is also switched off once, to see these histories go red.
"""

from __future__ import annotations

import pytest
import redis

from gpuboss.scripts import Script, source
from tests.integration.gpuboss.history import History, Violation
from tests.integration.gpuboss.script_harness import ScriptStore

_HISTORIES = 120
_STEPS = 40


@pytest.mark.parametrize("storm", [False, True], ids=["calm", "storm"])
def test_random_histories_keep_the_ledgers_promises(valkey: redis.Redis, storm: bool) -> None:
    happened: dict[str, int] = {}
    for seed in range(_HISTORIES):
        history = History(ScriptStore(valkey), seed, storm=storm)
        try:
            history.run(_STEPS)
        except AssertionError as error:
            raise AssertionError(f"history {seed} ({'storm' if storm else 'calm'}): {error}") from error
        happened = {what: happened.get(what, 0) + history.counts.get(what, 0) for what in happened | history.counts}
    wanted = {"granted", "started", "repeated"} | ({"wiped", "restarted", "rolled back", "jumped"} if storm else set())
    assert all(happened.get(what, 0) > 20 for what in wanted), happened


@pytest.mark.parametrize(
    ("off", "storm", "overrides"),
    [
        ("epoch", True, {"meta.run_id ~= args.run_id": "false", "meta.epoch < args.seen_epoch": "false"}),
        ("run id", True, {"if not meta.epoch or meta.run_id ~= args.run_id then": "if not meta.epoch then"}),
        ("idempotency", False, {"if known then": "if false then"}),
        (
            "tombstones",
            False,
            {"  redis.call('PEXPIRE', lease_key(id), TOMBSTONE_MS)": "  redis.call('DEL', lease_key(id))"},
        ),
        (
            "ending",
            True,
            {"set_state(id, lease, 'ending')": "finish(id, lease, 'freed')"},
        ),
        ("observed room", False, {"device.free < bytes": "false"}),
    ],
)
def test_without_its_protection_a_history_goes_wrong(
    valkey: redis.Redis, off: str, storm: bool, overrides: dict[str, str]
) -> None:
    for line in overrides:
        assert any(line in source(script).text for script in Script), f"no script says {line!r}"

    def goes_wrong(seed: int) -> bool:
        try:
            History(ScriptStore(valkey, overrides), seed, storm=storm).run(_STEPS)
        except (Violation, AssertionError, redis.ResponseError):
            return True
        return False

    assert any(goes_wrong(seed) for seed in range(_HISTORIES)), (
        f"{_HISTORIES} histories without {off} went well: the harness is blind to it"
    )
