"""Leases on device memory: who may use how much of which device, and proof that nobody uses more.

A training job installs this package alone. Nothing is imported here: every spawned engine passes through a small child
that imports `gpuboss.node_ledger` on its way, and what stood here would be on that way too. Import the module you need:
`gpuboss.client` for leases, `gpuboss.devices` for what the host has, `gpuboss.node_ledger` for what runs on it.
"""
