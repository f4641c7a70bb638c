"""Drafters that run a part of the target's own layers. Importing this package registers them and imports no torch."""

from adaptspec.drafters.early_exit import cats, cats_eagle, draft_verify, kangaroo

__all__ = ["cats", "cats_eagle", "draft_verify", "kangaroo"]
