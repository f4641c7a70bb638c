"""`python -m adaptspec` is the command `adaptspec`."""

from __future__ import annotations

from adaptspec.cli.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())
