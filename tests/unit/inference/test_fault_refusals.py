"""What those are told who ask for a model whose engine failed."""

from __future__ import annotations

import pytest

from inference.breaker import Open, Standing
from inference.fault import Fault
from inference.fault_refusals import crashes_too_often, stands
from tests.unit.inference.slot_world import MODEL


def test_an_open_breaker_says_how_long_and_what_was_said_last() -> None:
    error = crashes_too_often(MODEL, Open(400.0, 3, "GGML_ASSERT failed"), 250.0)
    assert error.message == (
        "the engine of 'robin' failed 3 times and is not started for another 150 s; then one request tries it. "
        "`model-boss load robin` tries it at once. The last failure: GGML_ASSERT failed"
    )
    assert error.retry_after_s == 150.0


@pytest.mark.parametrize(("fault", "setting"), [(Fault.BAD_ARGUMENTS, "`extra_args`"), (Fault.BAD_MODEL, "`path`")])
def test_what_no_try_can_mend_names_the_setting_to_change(fault: Fault, setting: str) -> None:
    error = stands(MODEL, Standing(fault, "its last words"))
    assert setting in error.message
    assert fault.words in error.message
    assert error.message.endswith("The last failure: its last words")
    assert (error.retry_after_s, error.fault) == (None, fault)


def test_memory_that_was_not_enough_twice_is_told_in_numbers() -> None:
    error = stands(MODEL, Standing(Fault.OUT_OF_MEMORY, "cudaMalloc failed"), out_of_memory="with 1MiB, and with 2MiB")
    assert error.message == "with 1MiB, and with 2MiB. The last failure: cudaMalloc failed"
