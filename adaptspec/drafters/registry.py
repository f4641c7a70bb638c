"""Names for drafters: one dict, one decorator, one lookup."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from adaptspec.drafters.base import Drafter
from adaptspec.names import unknown_name

DRAFTERS: dict[str, type[Drafter]] = {}


def register_drafter(name: str) -> Callable[[type[Drafter]], type[Drafter]]:
    """Class decorator that makes a drafter selectable by `name` in `pool=` and on the command line.

    Raises:
        ValueError: the name is taken, reserved, or holds one of the characters `@ / :` that arms use.
        TypeError: the class is not a `Drafter`.
    """
    if not name or name == "ar" or any(c in name for c in "@/:, ") or name.startswith("fixed"):
        raise ValueError(
            f"drafter name must be non-empty, not 'ar', and free of '@', '/', ':', ',' and spaces, got {name!r}"
        )

    def decorate(cls: type[Drafter]) -> type[Drafter]:
        if not (inspect.isclass(cls) and issubclass(cls, Drafter)):
            raise TypeError(f"register_drafter takes a Drafter class, got {cls!r}")
        if DRAFTERS.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(
                f"drafter name {name!r} is already taken by {DRAFTERS[name].__module__}.{DRAFTERS[name].__qualname__}"
            )
        cls.name = name
        DRAFTERS[name] = cls
        return cls

    return decorate


def make_drafter(spec: str | Drafter, **options: Any) -> Drafter:
    """A drafter from `"name"`, `"name:path-or-hub-id"`, or a `Drafter` object (returned as it is).

    Raises:
        ValueError: unknown name, unknown option, or a path where the drafter takes none (or none where it needs one).
    """
    if isinstance(spec, Drafter):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"a drafter must be a name or a Drafter object, got {spec!r}")
    name, _, path = spec.partition(":")
    if name not in DRAFTERS:
        raise unknown_name("drafter", name, DRAFTERS)
    cls = DRAFTERS[name]
    parameters = inspect.signature(cls).parameters
    if path:
        if "path" not in parameters:
            raise ValueError(f"drafter {name!r} takes no path, got {path!r}")
        options["path"] = path
    elif "path" in parameters and parameters["path"].default is inspect.Parameter.empty and "path" not in options:
        raise ValueError(f"drafter {name!r} needs a path or hub id: write '{name}:PATH'")
    for option in options:
        if option not in parameters:
            raise unknown_name(f"option of drafter {name!r}:", option, parameters)
    return cls(**options)
