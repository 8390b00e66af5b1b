"""Which model runs where, and keeping it alive.

Imports `gpuboss` (device memory) and is imported by `coordinator` (HTTP); a test enforces this direction.
The policy modules (events, actions, queue, placement, eviction, scheduler) are pure: no I/O, no clock, no randomness.
"""
