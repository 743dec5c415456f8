"""How what a peer says of itself is shown to people: ids in short, no proofs."""

from __future__ import annotations

from typing import cast

import msgspec

from moshpit.types import short

_PROOFS = frozenset({"admission", "signature", "lineage"})


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """A base without fields: the struct's ``repr`` has short ids and leaves proofs out."""

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={_shown(getattr(self, name))}"
            for name in self.__struct_fields__
            if name not in _PROOFS
        )
        return f"{type(self).__name__}({fields})"


def _shown(value: object) -> str:
    match value:
        case bytes():
            return short(value) if value else "none"
        case tuple():
            items = cast(tuple[object, ...], value)
            return f"[{', '.join(map(_shown, items))}]"
        case _:
            return repr(value)
