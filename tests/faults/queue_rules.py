"""Who may be granted before whom, and who must not wait any longer (promise 6). Standard library only.

Used by `tests.faults.events`. It does not know how the ledger chooses: it keeps, for each waiter, the device sets that
the waiter may have earmarked, and sees that what happens can be explained by one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.faults.books import Books, Lease, Violation

__all__ = ["check_overtaking", "could_ever_fit", "first_grantable", "fits", "forget_marks"]

Free = Mapping[str, int]


def fits(option: Mapping[str, int], free: Free) -> bool:
    """Whether every device of the option has room."""
    return all(name in free and free[name] >= size for name, size in option.items())


could_ever_fit = fits
"""The same, against what the devices could give if nobody used them."""


def first_grantable(books: Books, waiters: Iterable[Lease], free: Free) -> Lease | None:
    """The first that waits although an option of it fits, on devices that no earlier waiter can have earmarked."""
    earmarked: set[str] = set()
    caps = books.caps()
    for waiter in waiters:
        for option in waiter.options:
            if fits(books.wanted(waiter, option), free) and earmarked.isdisjoint(option):
                return waiter
        for index in _marks_of(waiter, caps):
            earmarked.update(waiter.options[index])
    return None


def check_overtaking(books: Books, granted: Lease, taken: Mapping[str, int], free: Free) -> list[Lease]:
    """`granted` gets what it takes; given the books just before, and what was free then.

    1. Nobody who comes before it could have been granted instead.
    2. Each of them is left a device set that nobody behind it was granted anything of, unless who was is pre-emptible.
    3. Where holders yield for one of them, nobody behind it gets anything of what they give up, pre-emptible or not:
       gives those of whom this is true only if nobody yields to them any more when the command is done. (One whose
       devices somebody more important waits for as well must begin anew.)
    """
    ahead = [waiter for waiter in books.waiters() if waiter.place < granted.place]
    passed = first_grantable(books, ahead, free)  # 1
    if passed is not None:
        raise Violation(f"{granted.id} was granted before {passed.id}, which comes first and had room")
    caps = books.caps()
    doubtful = []
    wanted: set[str] = set()
    for waiter in ahead:
        marks = _marks_of(waiter, caps)
        left = [index for index in marks if taken.keys().isdisjoint(waiter.options[index])]
        if marks and not left and not granted.preemptible:  # 2
            raise Violation(
                f"{granted.id} was granted {dict(taken)} past {waiter.id}, which comes first, wants one of "
                f"{[dict(waiter.options[index]) for index in marks]} and was passed on every other set already"
            )
        emptied = books.emptied_for(waiter)
        given_up = [index for index in marks if not emptied.isdisjoint(waiter.options[index])]
        is_free = any(wanted.isdisjoint(waiter.options[index]) for index in given_up)
        if is_free and not set(given_up) & set(left):  # 3
            doubtful.append(waiter)
        for index in marks:
            wanted.update(waiter.options[index])
        if not granted.preemptible:
            waiter.marks = left
    return doubtful


def forget_marks(waiter: Lease) -> None:
    """It may earmark anew: others yield to it, or do no more."""
    waiter.fitting, waiter.marks = [], []


def _marks_of(waiter: Lease, caps: Free) -> list[int]:
    """Its options that it may have earmarked; all that could ever fit, when these changed."""
    fitting = [index for index, option in enumerate(waiter.options) if could_ever_fit(option, caps)]
    if fitting != waiter.fitting:
        waiter.fitting = fitting
        waiter.marks = fitting
    return waiter.marks
