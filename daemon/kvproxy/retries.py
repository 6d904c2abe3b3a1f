"""How many second tries all requests together may cost: a few, and then a part of the requests there are.

Without it, a fleet whose workers fail one after the other would get each request as often as there are workers, just
when it can bear least.
"""

from __future__ import annotations


class RetryBudget:
    """Each request earns a part of a retry, up to a reserve."""

    def __init__(self, part: float = 0.2, reserve: float = 10.0) -> None:
        self._part = part
        self._reserve = reserve
        self._left = reserve

    def earn(self) -> None:
        """Note a request."""
        self._left = min(self._reserve, self._left + self._part)

    def take(self) -> bool:
        """Return whether one more try may be made, and count it."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
