"""Protections of the ledger, each with what switches it off: histories without it must go wrong.

Used by `test_protections.py`. A mutant replaces text of the scripts, or leaves out the nodes' own books; where the
scripts do not say that text any more, it fails loudly (`ScriptServer`), for a mutant that changes nothing would prove
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.faults.checker import Checker, FenceChecker, MemoryChecker

__all__ = ["MUTANTS", "Mutant"]

_ENDING = {"    set_state(id, lease, 'ending')\n": "    finish(id, lease, 'freed')\n"}
_ANY_VICTIM = {
    "return holder.preemptible and before(waiter, holder)": "return true",
    "while holder and (holder.priority < waiter": "while holder and false and (holder.priority < waiter",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """The ledger without one of its protections."""

    off: str
    """The protection."""
    red: str
    """What the checker says (a regular expression)."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Text of the scripts, and what replaces it."""
    guard: bool = True
    """Whether the nodes' own books refuse what does not fit."""
    judge: type[Checker] = Checker
    """Who reads the trace; a part of the checker shows that the harm itself is seen, not only what precedes it."""


MUTANTS = (
    Mutant(
        "epoch",
        r"fence .* was given to",
        {"meta.run_id ~= args.run_id": "false", "meta.epoch < args.seen_epoch": "false"},
        judge=FenceChecker,
    ),
    Mutant(
        "run id",
        r"an epoch began and nobody was told|epoch \d+ began|was answered",
        {"if not meta.epoch or meta.run_id ~= args.run_id then": "if not meta.epoch then"},
    ),
    Mutant("idempotency", r"and was granted|says it waits|the store says", {"if known then": "if false then"}),
    Mutant(
        "order",
        r"was granted before .*, which comes first|past .*, which comes first",
        {
            "string.format('%015.0f:%s', tonumber(lease.order), id)": (
                "string.format('%015.0f:%s', 4e12 - tonumber(lease.order), id)"
            )
        },
    ),
    Mutant(
        "clock",
        r"was ended by time at|had until",
        {"math.min(math.max(server - tonumber(found[5]), 0), MAX_CLOCK_STEP_MS)": "server - tonumber(found[5])"},
    ),
    Mutant("ending and ledger", r"physically oversubscribed", _ENDING, guard=False, judge=MemoryChecker),
    Mutant("ledger", r"physically oversubscribed", guard=False, judge=MemoryChecker),
    Mutant("ending", r"time made freed of|while its holder lives", _ENDING),
    Mutant(
        "tombstones",
        r"was answered|were answered|the store says|the store has",
        {"  redis.call('PEXPIRE', lease_key(id), TOMBSTONE_MS)": "  redis.call('DEL', lease_key(id))"},
    ),
    Mutant(
        "node_sync first",
        r"of a node that has not synced|unsynced would be right",
        {"if record.epoch == meta.epoch then": "if true then"},
    ),
    Mutant("fences", r"stale|does not mean it", {"return tonumber(lease.epoch) == fence.epoch and": "return true or"}),
    Mutant(
        "what is observed counts",
        r"free is|contradicts itself",
        {"local counted = math.max(bytes, observed[name] or 0)": "local counted = bytes"},
    ),
    Mutant(
        "the dead at the moment they were seen",
        r"does not mean it|lives",
        {"(not dead.state or dead.state == lease.state)": "true"},
    ),
    Mutant("revival", r"the store says", {"    set_state(id, lease, lease.was or 'active')\n": ""}),
    Mutant("room", r"was granted .*, and free was", {"if device.free < wanted then return false end": ""}),
    Mutant(
        "earmarks",
        r"past .*, which comes first",
        {"return not found or (found.loose and not": "return true or (found.loose and not"},
    ),
    Mutant("wake-up", r"waits for one of", {"queue().pump(open_books())": "", "queue().pump(books)\n": "\n"}),
    Mutant(
        "HTTP leases expire",
        r"put into ending",
        {"tonumber(lease.lease_ttl_ms or 0) > 0 then\n      local": "false then\n      local"},
    ),
    Mutant("allowed victims", r"was told to yield to", _ANY_VICTIM),
    Mutant(
        "enough or nobody",
        r"it is not enough for",
        {
            "    if lack > (desk.gain[name] or 0) then return nil end\n": "",
            "  if not is_enough(missing) then return nil end\n": "",
        },
    ),
    Mutant(
        "kept for the pre-emptor",
        r"which others give up for",
        {"mark(desk, waiter, name, 'emptying')": "mark(desk, waiter, name, 'loose')"},
    ),
    Mutant("withdrawal", r"which does not wait any more", {"        take_notice_back(holder.id)\n": ""}),
    Mutant(
        "acknowledged notices stay",
        r"it was taken back",
        {"if holder.by == '' or holder.acked then": "if holder.by == '' then"},
    ),
)
