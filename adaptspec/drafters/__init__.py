"""Drafters by name. Importing this package registers all of them and imports no torch."""

from adaptspec.drafters import (
    draft_model,
    eagle,
    griffin,
    hydra,
    layer_skip,
    lookahead,
    medusa,
    mtp,
    ngram_cache,
    prompt_lookup,
    rest,
    sam,
    suffix,
    token_recycling,
)
from adaptspec.drafters.base import Drafter, Needs
from adaptspec.drafters.registry import DRAFTERS, make_drafter, register_drafter

__all__ = [
    "DRAFTERS",
    "Drafter",
    "Needs",
    "draft_model",
    "eagle",
    "griffin",
    "hydra",
    "layer_skip",
    "lookahead",
    "make_drafter",
    "medusa",
    "mtp",
    "ngram_cache",
    "prompt_lookup",
    "register_drafter",
    "rest",
    "sam",
    "suffix",
    "token_recycling",
]
