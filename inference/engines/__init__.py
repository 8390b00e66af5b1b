"""Engine programs: which llama-server is used, and how one is built where there is none.

`resolve.py` finds (standard library only, milliseconds), `build.py` builds. `make setup`, the `model-boss engines`
commands, the broker and the tests come here. Reading order: resolve, versions, cache, recipe, accelerator, build.
"""

from __future__ import annotations

from inference.engines.resolve import find_llama_server

__all__ = ["find_llama_server"]
