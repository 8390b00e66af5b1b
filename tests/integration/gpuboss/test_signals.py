"""Signal handlers that call gpuboss, at any moment, also where they interrupt gpuboss itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import gpuboss
from gpuboss import session
from gpuboss.settings import LedgerSettings
from tests.integration.gpuboss.keeper_harness import LedgerUnderTest
from tests.integration.gpuboss.programs import output
from tests.support import wait_until


@pytest.fixture
def settings(ledger: LedgerUnderTest) -> Iterator[LedgerSettings]:
    """Of the test's ledger; this process's session with it is closed afterwards."""
    yield ledger.settings
    session.close_all()


_EVERYWHERE = """
import gc, itertools
from gpuboss import session

FILES = ("/gpuboss/", "/threading.py", "/concurrent/futures/", "/asyncio/")
lease = None
refused = 0

class Stop(BaseException):
    pass

def interrupted(number, act, handler):
    "Run `act`, and the handler at the so many-th moment that CPython would run one; whether there are so many."
    left = number

    def look(frame, event, argument):
        nonlocal left
        if event in ("call", "c_return") and any(part in frame.f_code.co_filename for part in FILES):
            left -= 1
            if left == 0:
                handler()

    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
    return left <= 0

def quick():
    global lease
    lease = gpuboss.acquire("1MiB", settings=settings)
    lease.release()

def slow():
    global lease
    lease = gpuboss.acquire("1MiB", settings=settings)
    lease.resize("2MiB")
    lease.release()

def first():
    session.close_all()
    quick()

def release():
    if lease is not None:
        lease.release()

def stop():
    release()
    raise Stop

def enter():
    with gpuboss.hold("1MiB", settings=settings):
        pass

def look():
    gpuboss.snapshot(settings)

def catching(call):
    def handler():
        global refused
        try:
            call()
        except RuntimeError as error:
            assert "called from a signal handler" in str(error), error
            refused += 1
    return handler

act = globals()[order["act"]]
handler = {"release": release, "stop": stop, "hold": catching(enter), "look": catching(look)}[order["handler"]]
act()
for number in itertools.count(1, order["step"]):
    lease = None
    try:
        if not interrupted(number, act, handler):
            break
    except Stop:
        pass
    except gpuboss.StaleFence:
        assert order["handler"] == "release"  # it was given back in the middle of a resize
say([number, refused])
lease = None
gc.collect()
sys.stdin.read(1)
"""


@pytest.mark.parametrize(
    ("act", "handler"), [(act, handler) for act in ("quick", "slow") for handler in ("release", "stop", "hold", "look")]
)
def test_a_handler_at_any_moment_neither_hangs_nor_breaks_what_it_interrupts(
    ledger: LedgerUnderTest, settings: LedgerSettings, act: str, handler: str
) -> None:
    """The books, the session's errands, what threads wait by: whatever was interrupted goes on after it."""
    told, complaints = output(ledger, _EVERYWHERE, act=act, handler=handler, step=1)
    moments, refused = json.loads(told)
    assert moments > 100
    assert bool(refused) == (handler in ("hold", "look")), "it met gpuboss in the middle of the books"
    if handler != "stop":  # of what is raised within a finalizer Python itself complains
        assert complaints == ""
    wait_until(lambda: not gpuboss.snapshot(settings).leases, "everything to be given back")


def test_a_handler_that_interrupts_the_opening_of_the_session_is_told_so(
    ledger: LedgerUnderTest, settings: LedgerSettings
) -> None:
    told, complaints = output(ledger, _EVERYWHERE, act="first", handler="hold", step=7)
    moments, refused = json.loads(told)
    assert 10 < refused < moments
    assert complaints == ""


_ENDED = """
import signal

def end(number, frame):
    gpuboss.release(lease)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
lease = gpuboss.acquire("1MiB", settings=settings)
lease.release()
signal.signal(signal.SIGALRM, lambda number, frame: lease.release())
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.002)
for turn in range(400):
    lease = gpuboss.acquire("1MiB", settings=settings)
    lease.release()
signal.setitimer(signal.ITIMER_REAL, 0)
while gpuboss.snapshot(settings).leases:
    pass
say("released")
lease = gpuboss.acquire("1MiB", settings=settings)
signal.raise_signal(signal.SIGTERM)
"""


def test_a_storm_of_signals_that_release(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    assert output(ledger, _ENDED) == ('"released"\n', "")
    assert not gpuboss.snapshot(settings).leases
