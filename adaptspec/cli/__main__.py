"""`python -m adaptspec.cli`, and where `python -m adaptspec` finds the command."""

from __future__ import annotations

from adaptspec.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
