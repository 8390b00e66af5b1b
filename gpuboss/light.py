"""Frozen values for the modules that every engine start waits for.

`node_ledger` and `identity` are imported by the shim between a request and its engine. There `dataclasses` (which
loads `inspect`) costs about 25 ms of interpreter time and `typing` about 12 ms, so their values derive from this
class instead. Everywhere else values are frozen dataclasses.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Never, Self


class Value:
    """An immutable value whose fields are its `__slots__`; equal when type and fields are equal."""

    __slots__: tuple[str, ...] = ()

    def _fill(self, **fields: object) -> None:
        """Set every field once; called by the subclass's `__init__`."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed."""
        return type(self)(**{name: getattr(self, name) for name in self.__slots__} | changes)

    def __setattr__(self, name: str, value: object) -> Never:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> Never:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot delete {name}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__slots__))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({fields})"
