"""Errors for names that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> ValueError:
    """The error for an unknown name, with the valid ones and a did-you-mean."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return ValueError(f"unknown {kind} {name!r}{hint} Valid: {', '.join(names)}")
