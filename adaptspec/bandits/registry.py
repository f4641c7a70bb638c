"""Names for policies: one dict, one decorator, one lookup."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from adaptspec.bandits.base import Policy
from adaptspec.names import unknown_name

POLICIES: dict[str, type[Policy]] = {}


def register_policy(name: str) -> Callable[[type[Policy]], type[Policy]]:
    """Class decorator that makes a policy selectable by `name`.

    Raises:
        ValueError: the name is taken, empty, or holds one of `: ( ) ,` or a space.
        TypeError: the class is not a `Policy`.
    """
    if not name or any(c in name for c in ":(), "):
        raise ValueError(f"policy name must be non-empty and free of ':', '(', ')', ',' and spaces, got {name!r}")

    def decorate(cls: type[Policy]) -> type[Policy]:
        if not (inspect.isclass(cls) and issubclass(cls, Policy)):
            raise TypeError(f"register_policy takes a Policy class, got {cls!r}")
        if POLICIES.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"policy name {name!r} is already taken by {POLICIES[name].__qualname__}")
        cls.name = name
        POLICIES[name] = cls
        return cls

    return decorate


def make_policy(name: str, *, n_arms: int, seed: int = 0, **options: Any) -> Policy:
    """A policy by name; `"fixed:3"` is the policy that always plays arm 3.

    Raises:
        ValueError: unknown name or option, or a value that the policy does not allow.

    >>> make_policy("hedge", n_arms=4).select().index in range(4)
    True
    """
    if not isinstance(name, str):
        raise ValueError(f"a policy name must be text, got {name!r}")
    base, colon, argument = name.partition(":")
    if base not in POLICIES:
        raise unknown_name("policy", base, POLICIES)
    if colon:
        if base != "fixed":
            raise ValueError(f"policy {base!r} takes nothing after ':', got {name!r}")
        if not argument.isdecimal():
            raise ValueError(f"policy 'fixed' must be written fixed:INDEX with a whole number, got {name!r}")
        options = {"index": int(argument), **options}
    cls = POLICIES[base]
    valid = [parameter for parameter in inspect.signature(cls).parameters if parameter not in ("n_arms", "seed")]
    for option in options:
        if option not in valid:
            if not valid:
                raise ValueError(f"policy {base!r} takes no options, got {option!r}")
            raise unknown_name(f"option of policy {base!r}:", option, valid)
    return cls(n_arms, seed, **options)
