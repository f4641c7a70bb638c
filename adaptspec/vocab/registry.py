"""Names for vocabulary heads: one dict, one decorator, one lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adaptspec.names import unknown_name
from adaptspec.vocab.base import VocabHead

VOCAB_HEADS: dict[str, type[VocabHead]] = {}


def register_vocab_head(kind: str) -> Callable[[type[VocabHead]], type[VocabHead]]:
    """Class decorator that makes a head selectable by `kind` in `vocab=`, in arms and on the command line.

    Raises:
        ValueError: the kind is taken, or holds one of the characters that arms and lists use.
        TypeError: the class is not a `VocabHead`.
    """
    if not kind or any(c in kind for c in "@/:+, "):
        raise ValueError(f"kind must be non-empty and free of '@', '/', ':', '+', ',' and spaces, got {kind!r}")

    def decorate(cls: type[VocabHead]) -> type[VocabHead]:
        if not (isinstance(cls, type) and issubclass(cls, VocabHead)):
            raise TypeError(f"register_vocab_head takes a VocabHead class, got {cls!r}")
        if VOCAB_HEADS.get(kind, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"kind {kind!r} is already taken by {VOCAB_HEADS[kind].__qualname__}")
        cls.kind = kind
        VOCAB_HEADS[kind] = cls
        return cls

    return decorate


def make_head(name: str) -> VocabHead:
    """A fresh head from "full", "fr:16384", "evospec:16384+512", ...

    Raises:
        ValueError: unknown kind, or an argument that the kind does not take.

    >>> make_head("full").name
    'full'
    """
    if not isinstance(name, str):
        raise ValueError(f"vocab must be a name such as 'full' or 'fr:16384', got {name!r}")
    kind, colon, argument = name.partition(":")
    if kind not in VOCAB_HEADS:
        raise unknown_name("vocab", kind, VOCAB_HEADS)
    if colon and not argument:
        raise ValueError(f"vocab {name!r} ends in a colon: write what should stand behind it, or leave it out")
    return VOCAB_HEADS[kind].parse(name, argument)


def check_vocab(names: Sequence[str]) -> tuple[str, ...]:
    """Names of vocabularies, each of which `make_head` knows.

    Raises:
        ValueError: none, a repeated or an unknown one.
    """
    if isinstance(names, str) or not names:
        raise ValueError(f"vocab must be a list of one or more names, got {names!r}")
    for name in names:
        make_head(name)
    if len(set(names)) < len(names):
        raise ValueError(f"vocab must hold different names, got {', '.join(names)}")
    return tuple(names)
