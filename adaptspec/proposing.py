"""Asking drafters, and keeping their faults away from the output."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from adaptspec.drafters.base import Drafter
from adaptspec.types import Arm, DraftContext, DraftTree, ExtraRows, PairedRows

logger = logging.getLogger("adaptspec")


class DraftTimeout(RuntimeError):
    """A drafter took longer than allowed."""


class Proposer:
    """Asks drafters for trees and checks them. A drafter that raises, returns an invalid tree, or takes longer than
    `timeout` seconds is set aside for the request and logged once; the output does not change, since drafts only
    suggest.

    Drafters with `isolate = True` run in a thread of their own, so that a call that never returns is given up.
    """

    def __init__(self, *, vocab_size: int, timeout: float) -> None:
        self.vocab_size = vocab_size
        self.timeout = timeout
        self.set_aside: dict[str, str] = {}
        self._fault: str | None = None
        self._worker: _Worker | None = None
        self._hung: _Worker | None = None

    def healthy(self, drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
        """The drafters that have not been set aside."""
        return {name: drafter for name, drafter in drafters.items() if name not in self.set_aside}

    def propose(
        self, arm: Arm, drafter: Drafter, context: DraftContext
    ) -> tuple[DraftTree, ExtraRows | PairedRows | None]:
        """The drafter's tree for the arm's budget and the rows it adds to the verify pass; empty after a fault."""
        assert isinstance(arm.budget, int)
        budget = arm.budget

        def ask() -> tuple[DraftTree, ExtraRows | PairedRows | None]:
            tree = drafter.propose(context, budget)
            if not isinstance(tree, DraftTree):
                raise TypeError(f"propose must return a DraftTree, got {type(tree).__name__}")
            tree.validate(vocab_size=self.vocab_size, budget=budget)
            if len(tree) and int(tree.depths().max()) > context.max_depth:
                raise ValueError(f"depth must be <= {context.max_depth}, got {int(tree.depths().max())}")
            extra = drafter.extra_rows(context, budget) if drafter.needs.extra_rows else None
            if isinstance(extra, ExtraRows):
                _check_extra(extra, vocab_size=self.vocab_size, max_depth=context.max_depth)
            return tree, extra

        stuck = _STUCK.get(drafter)
        if stuck is not None and stuck.running:
            self._give_up(arm.drafter, "its last proposal is still running")
            return DraftTree.empty(), None
        answer = self.call(arm.drafter, ask, isolate=drafter.isolate)
        if answer is None and self._hung is not None:
            _STUCK[drafter], self._hung = self._hung, None
        return (DraftTree.empty(), None) if answer is None else answer

    def call(self, name: str, function: Callable[[], Any], *, isolate: bool = False) -> Any:
        """Run one call into a drafter; None and set aside if it fails."""
        started = perf_counter()
        try:
            if isolate:
                if self._worker is None:
                    self._worker = _Worker()
                answer = self._worker.run(function, self.timeout)
            else:
                answer = function()
            if perf_counter() - started > self.timeout:
                raise DraftTimeout(f"took {perf_counter() - started:.1f} s, allowed are {self.timeout:g} s")
        except Exception as error:  # any fault of third-party drafting code may only cost speed, never the output
            if isinstance(error, DraftTimeout):
                # Its thread may never come back; the next call gets a new one.
                self._hung, self._worker = self._worker, None
            self._give_up(name, f"{type(error).__name__}: {error}")
            return None
        return answer

    def _give_up(self, name: str, why: str) -> None:
        reason = f"{name}: {why}"
        self.set_aside[name] = reason
        self._fault = reason
        logger.warning("drafter set aside for this request: %s", reason)

    def take_fault(self) -> str | None:
        """The fault since the last call, for the step record."""
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        """End the worker thread."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _Worker:
    """One daemon thread that runs calls with a time limit."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.running = False
        threading.Thread(target=self._loop, name="adaptspec-drafter", daemon=True).start()

    def run(self, function: Callable[[], Any], timeout: float) -> Any:
        self.running = True
        self._calls.put(function)
        try:
            answer, error = self._answers.get(timeout=timeout)
        except Empty as empty:
            raise DraftTimeout(f"no answer within {timeout:g} s") from empty
        if error is not None:
            raise error
        return answer

    def stop(self) -> None:
        self._calls.put(None)

    def _loop(self) -> None:
        while (function := self._calls.get()) is not None:
            self.running = True
            try:
                self._answers.put((function(), None))
            except BaseException as error:  # noqa: BLE001  handed to the caller, who decides
                self._answers.put((None, error))
            self.running = False


_STUCK: weakref.WeakKeyDictionary[Drafter, _Worker] = weakref.WeakKeyDictionary()
"""Drafters whose call never came back in time, and the thread in which it may still run."""


def _check_extra(extra: ExtraRows, *, vocab_size: int, max_depth: int) -> None:
    """Raises ValueError when the arrays of extra rows do not fit together."""
    count = len(extra.token_ids)
    if extra.depths.shape != (count,) or extra.visible.shape != (count, count) or extra.visible.dtype != np.bool_:
        raise ValueError(
            f"extra rows must have depths [{count}] and visible bool [{count}, {count}], "
            f"got {list(extra.depths.shape)} and {extra.visible.dtype} {list(extra.visible.shape)}"
        )
    if count and not (extra.token_ids.min() >= 0 and extra.token_ids.max() < vocab_size):
        raise ValueError(f"token_ids of extra rows must be in [0, {vocab_size})")
    if count and not (extra.depths.min() >= 1):
        raise ValueError(f"depths of extra rows must be >= 1, got {int(extra.depths.min())}")
    if not extra.visible.diagonal().all():
        raise ValueError("every extra row must see itself")
