"""The scheduler under a virtual clock: what a set of devices would do with a stream of requests, without any of them.

    trace.py       what is simulated: devices, models, limits, requests
    trace_file.py  reading and writing it; recorder.py takes it down from a running broker
    synthetic.py   made-up ones, from a few words
    world.py       the virtual clock, ledger, slots and callers around a scheduler
    policies.py    which schedulers there are: ours, and the rules of peers in peer.py and peers.py
    journal.py     what happened, taken down from events and decisions
    report.py      the figures of it; plots.py draws them
    replay.py      all of the above in one call

Called by `coordinator/cli/simulate.py` and `benchmarks/simulation.py`; `world.py` also by whoever wants to know what a
copy of a live scheduler would do next.
"""
