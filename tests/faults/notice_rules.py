"""Who may be told to yield, and to whom (promise 7). Standard library only.

Used by `tests.faults.events`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tests.faults.books import Books, Lease, Notice, Violation
from tests.faults.queue_rules import fits

__all__ = ["check_disturbed", "check_nobody_idle", "may_have"]


def may_have(waiter: Lease, holder: Lease) -> bool:
    """Whether it must yield.

    Slots yield to whoever is as important, but not to their own broker's. Others, if they declared it, yield to whoever
    comes before them in the queue's order.
    """
    if holder.kind == "slot":
        return holder.priority >= waiter.priority and not _are_siblings(waiter, holder)
    return holder.preemptible and waiter.place < holder.place


def check_disturbed(books: Books, waiter: Lease, told: Iterable[Lease]) -> None:
    """Holders were told to yield to this waiter by one command.

    1. Each of them is one that must.
    2. With them and with what is coming anyway there is enough for one of its device sets: else nobody is disturbed.
    3. None of them is told in vain, and none instead of a less important one (seen where nobody else is waiting first).
    """
    if waiter.state != "queued":
        raise Violation(f"holders were told to yield to {waiter.id}, which is {waiter.state}")
    told = list(told)
    for holder in told:
        if not may_have(waiter, holder):  # 1
            raise Violation(
                f"{holder.id} ({holder.kind}, {holder.place}, {holder.preemptible=}) was told to yield to "
                f"{waiter.id} ({waiter.kind}, {waiter.place})"
            )
    room = books.free()
    coming = with_back(room, (holder for holder in books.held() if holder.notice))
    enough = [option for option in waiter.options if fits(books.wanted(waiter, option), coming)]
    if not enough:  # 2
        raise Violation(
            f"{[one.id for one in told]} must yield to {waiter.id}, and it is not enough for {waiter.options}"
        )
    if books.waiters()[0] is not waiter or len(enough) > 1:
        return
    (option,) = enough
    firm = [holder for holder in books.held() if holder.notice and _is_firm(holder.notice, waiter)]
    for holder in told:  # 3
        without = with_back(room, (other for other in firm if other is not holder))
        if fits(books.wanted(waiter, option), without):
            raise Violation(f"{holder.id} must yield to {waiter.id}, which has enough without it")
        if holder.notice and holder.notice.is_repeated:
            continue  # it is disturbed already
        for other in books.held():
            instead = all(other.uses.get(name, 0) >= holder.uses.get(name, 0) for name in option)
            if not other.notice and other.priority > holder.priority and instead and may_have(waiter, other):
                raise Violation(
                    f"{holder.id} must yield to {waiter.id}, and {other.id} is less important and has as much"
                )


def check_nobody_idle(books: Books, new: Collection[str]) -> None:
    """Where the first in the queue could have all it needs from holders that must yield to it, they were told.

    `new`: what the same command granted; they are told by the next one.
    """
    waiters = books.waiters()
    if not waiters:
        return
    first = waiters[0]
    own = [holder for holder in books.held() if _are_siblings(first, holder)]
    # Its broker is asked first; and a set that is being emptied for it already is kept.
    if own or books.noticed_for(first) or books.emptied_for(first):
        return
    room = books.free()
    possible = with_back(room, (holder for holder in books.held() if holder.notice or _can_yield(first, holder, new)))
    coming = with_back(room, (holder for holder in books.held() if holder.notice))
    wanted = [books.wanted(first, option) for option in first.options]
    if any(fits(option, possible) for option in wanted) and not any(fits(option, coming) for option in wanted):
        raise Violation(f"{first.id} waits for one of {first.options}, and holders that must yield to it were not told")


def with_back(room: Mapping[str, int], holders: Iterable[Lease]) -> dict[str, int]:
    """What there is once these have ended."""
    back = dict(room)
    for holder in holders:
        for name, size in holder.uses.items():
            if name in back:
                back[name] += size
    return back


def _can_yield(waiter: Lease, holder: Lease, new: Collection[str]) -> bool:
    return holder.id not in new and may_have(waiter, holder)


def _is_firm(notice: Notice, waiter: Lease) -> bool:
    """Whether the memory comes back, and nobody else may lay claim to it."""
    return notice.acked or notice.by in ("", waiter.id)


def _are_siblings(one: Lease, other: Lease) -> bool:
    return one.kind == other.kind == "slot" and one.owner == other.owner
