"""A claim that ran out of memory is raised once, and then refused with every number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpuboss.units import GIB, MIB
from inference.model import Category, Model
from inference.raised import raised, why_refused

MODEL = Model("robin", Category.LLM, "llama-server", Path("robin.gguf"), 4 * GIB, "file 3.6GiB x 1.1", 1, 2048)


def test_a_claim_is_raised_by_15_percent_and_says_so() -> None:
    again = raised(MODEL)
    assert again.claim_bytes == 4711 * MIB
    assert again.claim_basis == "4GiB + 15 %, for that ran out of memory (file 3.6GiB x 1.1)"


def test_it_is_raised_to_what_was_seen_where_that_is_more() -> None:
    again = raised(MODEL, 6 * GIB)
    assert again.claim_bytes == 6 * GIB
    assert again.claim_basis.startswith("what it used when it ran out of 4GiB")


def test_its_host_memory_is_raised_with_it() -> None:
    assert raised(replace(MODEL, host_bytes=100 * MIB)).host_bytes == 115 * MIB


def test_the_refusal_carries_every_number_and_the_remedy() -> None:
    words = why_refused(MODEL, raised(MODEL), {"sim1": GIB, "sim0": 5 * GIB}, observed_bytes=4 * GIB)
    assert words == (
        "model 'robin' ran out of memory with 4GiB (file 3.6GiB x 1.1), and again with 4.6GiB. It was seen to use "
        "4GiB. sim0 had 5GiB free, sim1 had 1GiB free. Set vram in its manifest to what it needs, or lower context, "
        "parallel or gpu_layers"
    )
