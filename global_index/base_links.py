"""Which holder counts which other holder's blocks as its own in queries."""

from __future__ import annotations

from emberkv_proto.errors import IntegrityError
from global_index.index import MAX_HOLDERS, Holder


class BaseLinks:
    """Links from a holder to its base, and back. One level deep. All calls O(dependents)."""

    def __init__(self) -> None:
        self._bases: dict[Holder, Holder] = {}
        self._dependents: dict[Holder, list[Holder]] = {}

    def base(self, holder: Holder) -> Holder | None:
        return self._bases.get(holder)

    def bases(self) -> tuple[Holder, ...]:
        """The holders that are a base."""
        return tuple(self._dependents)

    def dependents(self, base: Holder) -> tuple[Holder, ...]:
        """The holders whose base this is, in the order they were linked."""
        return tuple(self._dependents.get(base, ()))

    def set_base(self, holder: Holder, base: Holder | None) -> None:
        """Replace the link of `holder`. Raises IntegrityError when a base would have a base."""
        for number in (holder, *([] if base is None else [base])):
            if not 0 <= number < MAX_HOLDERS:
                raise IntegrityError(f"holder {number} is not in 0..{MAX_HOLDERS - 1}")
        if base is not None and (base == holder or base in self._bases or self.dependents(holder)):
            raise IntegrityError(f"holder {base} cannot be the base of {holder}: a base has none")
        old = self._bases.pop(holder, None)
        if old is not None:
            self._dependents[old].remove(holder)
            if not self._dependents[old]:
                del self._dependents[old]
        if base is not None:
            self._bases[holder] = base
            self._dependents.setdefault(base, []).append(holder)

    def forget(self, holder: Holder) -> None:
        """Clear the links from and to a holder."""
        self.set_base(holder, None)
        for dependent in self.dependents(holder):
            self.set_base(dependent, None)

    def check_integrity(self) -> None:
        """Assert that both directions say the same and that no base has a base."""
        back = {(holder, base) for base, all_ in self._dependents.items() for holder in all_}
        assert back == set(self._bases.items()), "links and back links differ"
        assert sum(map(len, self._dependents.values())) == len(back), "a link stands twice"
        assert not self._bases.keys() & self._dependents.keys(), "a base has a base"
