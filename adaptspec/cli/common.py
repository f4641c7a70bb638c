"""What several commands share: names, lists of values, consoles, loading the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PREFERRED_STRATEGIES = ("mixture", "hedge", "ucb", "exp3")
"""Shown by default where they are registered, most interesting first."""

PREFERRED_POOL = ("suffix", "prompt-lookup", "token-recycling")
"""Default drafters where they are registered: free of training, and cheap next to any target."""


def split_names(values: Iterable[str] | None) -> tuple[str, ...]:
    """Names from options that may be repeated and may hold several names each, separated by commas.

    >>> split_names(["suffix, rest:store.bin", "prompt-lookup"])
    ('suffix', 'rest:store.bin', 'prompt-lookup')
    """
    names = (name.strip() for value in values or () for name in value.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def parse_budgets(text: str) -> tuple[int | Literal["auto"], ...]:
    """Budgets from "8,32" or "8,auto".

    Raises:
        ValueError: an entry is neither a whole number nor "auto".
    """
    budgets: list[int | Literal["auto"]] = []
    for name in split_names([text]):
        if name != "auto" and not name.isdecimal():
            raise ValueError(f"budgets must be whole numbers >= 0 or 'auto', separated by commas, got {name!r}")
        budgets.append("auto" if name == "auto" else int(name))
    if not budgets:
        raise ValueError("budgets must not be empty")
    return tuple(dict.fromkeys(budgets))


def check_at_least(minimum: int, **values: int | None) -> None:
    """Check whole-number options; None means not given.

    Raises:
        ValueError: names the option, its value and the minimum.
    """
    for name, value in values.items():
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be >= {minimum}, got {value}")


def available_strategies() -> tuple[str, ...]:
    """Names that `AdaptiveSpec(strategy=...)` takes besides `fixed:<arm>`."""
    from adaptspec.control.strategies import strategy_names

    return strategy_names()


def default_strategies() -> tuple[str, ...]:
    """The preferred ones of the registered strategies; empty if none is registered."""
    available = available_strategies()
    return tuple(name for name in PREFERRED_STRATEGIES if name in available)


def default_strategy(pool: Sequence[str]) -> str:
    """The first of the default strategies; without any, an arm of the pool's first drafter."""
    if strategies := default_strategies():
        return strategies[0]
    first = pool[0]
    return f"fixed:{first}" if is_arm(first) or first == "ar" else f"fixed:{first.partition(':')[0]}@16"


def default_pool() -> tuple[str, ...]:
    """The preferred ones of the registered drafters, all that need no path if none of them is registered."""
    everything = path_free_drafters()
    return tuple(name for name in PREFERRED_POOL if name in everything) or everything


def path_free_drafters() -> tuple[str, ...]:
    """Registered drafters that can be made from their name alone."""
    from adaptspec.drafters import DRAFTERS

    return tuple(name for name, cls in DRAFTERS.items() if weights_argument(cls) != "required")


def weights_argument(drafter: Callable[..., Any]) -> Literal["none", "optional", "required"]:
    """Whether a drafter class takes a path to weights or data."""
    import inspect

    parameter = inspect.signature(drafter).parameters.get("path")
    if parameter is None:
        return "none"
    return "required" if parameter.default is inspect.Parameter.empty else "optional"


def choose_pool(values: Sequence[str] | None) -> tuple[str, ...]:
    """The pool of `--pool`: default without one, every path-free drafter for "all"."""
    names = split_names(values)
    if not names:
        return default_pool()
    if "all" not in names:
        return names
    return tuple(dict.fromkeys([*path_free_drafters(), *(name for name in names if name != "all")]))


def choose_strategies(values: Sequence[str] | None) -> tuple[str, ...]:
    """The strategies of `--strategies`: default without one, none for "none", all registered ones for "all"."""
    names = split_names(values)
    if not names:
        return default_strategies()
    if names == ("none",):
        return ()
    from adaptspec.control.strategies import check_strategy

    if "all" in names:
        names = tuple(dict.fromkeys([*available_strategies(), *(name for name in names if name != "all")]))
    return tuple(check_strategy(name) for name in names)


def make_pool(entries: Iterable[str]) -> list[Any]:
    """Fresh drafters, and arms that were given whole, for `AdaptiveSpec(pool=...)`.

    Raises:
        ValueError: unknown drafter, or a path missing or not taken.
    """
    from adaptspec.drafters import make_drafter
    from adaptspec.types import Arm

    made: list[Any] = []
    for entry in entries:
        if entry == "ar":
            made.append(Arm.autoregressive())
            continue
        arm = Arm.parse(entry) if is_arm(entry) else None
        drafter = make_drafter(entry if arm is None else arm.drafter)
        made.append(drafter if arm is None else arm)
    return made


def is_arm(entry: str) -> bool:
    """Whether a pool entry is a whole arm like `suffix@16`; a path after a colon may hold an @, too."""
    return "@" in entry.partition(":")[0]


def console(*, error: bool = False) -> Console:
    """A rich console for stdout or stderr; 160 columns wide into a pipe."""
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 160, highlight=False)


def show(output: Console, table: Table) -> None:
    """Print a table as wide as it is: in a narrow window lines wrap, but no number is ever cut off."""
    from rich.measure import Measurement

    unlimited = output.options.update(max_width=1000)
    output.width = max(output.width, Measurement.get(output, unlimited, table).maximum)
    output.print(table)


def quiet_libraries() -> None:
    """Keep notes of the libraries below off the terminal; their errors still show."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load_model(name: str, *, dtype: str = "auto", device: str = "auto", threads: int | None = None) -> tuple[Any, Any]:
    """The target and its tokenizer.

    Args:
        name: "embedded", a hub id, a local folder or a GGUF file.
        threads: CPU threads, None for the library's default.

    Raises:
        ValueError: unknown dtype or device, or a model that cannot be loaded.
        FileNotFoundError: no such folder, file or hub model.
    """
    import torch

    from adaptspec.target.loading import load_target

    quiet_libraries()
    if threads is not None:
        check_at_least(1, threads=threads)
        torch.set_num_threads(threads)
    return load_target(name, dtype=dtype, device=device)


def dtype_name(model: Any) -> str:
    """The dtype in which a model runs, like "float32"."""
    return str(model.dtype).removeprefix("torch.")
