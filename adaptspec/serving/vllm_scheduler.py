"""Schedulers for vLLM that set the draft length of vLLM's own drafters at every step, one length for the whole batch.

`make_schedulers` derives them from vLLM's, after checking that what they override is still what it was written for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from adaptspec.names import unknown_name
from adaptspec.serving.types import count_drafts
from adaptspec.serving.vllm_capture import fields_problem, signature_problem
from adaptspec.serving.vllm_lengths import METHODS, Came, LengthControl, Waiting
from adaptspec.serving.vllm_settings import read_settings, request_limit

logger = logging.getLogger("adaptspec")

_OVERRIDDEN = {
    "_update_after_schedule": ("self", "scheduler_output"),
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "update_draft_token_ids": ("self", "draft_token_ids"),
}
_FIELDS = ("num_spec_tokens_to_schedule", "num_scheduled_tokens", "scheduled_spec_decode_tokens", "finished_req_ids")


def scheduler_problem(scheduler_class: type, output_class: type) -> str | None:
    """What has changed in a scheduler of vLLM that the derived one relies on; None if nothing has."""
    for name, parameters in _OVERRIDDEN.items():
        function = getattr(scheduler_class, name, None)
        if function is None:
            return f"{scheduler_class.__name__} has no {name}"
        if problem := signature_problem(function, parameters):
            return problem
    return fields_problem(output_class, _FIELDS)


class AdaptiveLengths:
    """What both schedulers add to vLLM's, from which they derive, too.

    Class attributes:
        placeholders: drafts are scheduled before they are there (scheduling ahead).

    Raises:
        ValueError: settings that do not fit, or a drafter of vLLM that cannot change its length.
        RuntimeError: this vLLM is not the one that the class was written for.
    """

    placeholders = False
    vllm_config: Any
    scheduler_config: Any
    requests: dict[str, Any]
    num_spec_tokens: int
    max_model_len: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        speculative = self.vllm_config.speculative_config
        if speculative is None:
            raise ValueError("the adaptive scheduler needs speculative_config: there is no draft length to set")
        method = speculative.method
        if method == "custom_class":
            raise ValueError("method custom_class sets its own draft lengths: leave scheduler_cls out")
        if method not in METHODS:
            raise unknown_name("speculative method for the adaptive scheduler:", method, METHODS)
        if not hasattr(self, "dynamic_sd_lookup"):
            raise RuntimeError("adaptspec cannot schedule in this vLLM: Scheduler has no dynamic_sd_lookup")
        longest = self.num_spec_tokens
        seats = self.scheduler_config.max_num_seqs
        settings = read_settings(self.vllm_config.additional_config, longest=longest)
        # vLLM's drafters run their first forward pass at length 0, too: their caches never go stale.
        policy = settings.policy([method], uniform=True, most_rows=seats, stateful=())
        self.length_control = LengthControl(policy, drafter=method, longest=longest)
        self._proposed: dict[str, int] = {}
        if self.dynamic_sd_lookup is None:
            # vLLM fills up new rows with padding unless lengths may change; a table says that they may.
            self.dynamic_sd_lookup = [longest] * (seats + 1)
        logger.info("adaptspec sets the draft length of %s among 0, %s", method, ", ".join(map(str, settings.lengths)))

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        control = self.length_control
        if scheduler_output.finished_req_ids:
            control.finish(scheduler_output.finished_req_ids)
            for request_id in scheduler_output.finished_req_ids:
                self._proposed.pop(request_id, None)
        waiting: list[Waiting] = []
        prefill = prefill_left = 0
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            prefill += max(0, count - 1 - len(drafts.get(request_id, ())))
            left = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens - count
            if left > 0:
                prefill_left += left
                continue
            asked = request.sampling_params
            room = self.max_model_len - request.num_tokens - 1
            limit = request_limit(getattr(asked, "extra_args", None), longest=self.length_control.longest)
            most = getattr(asked, "max_tokens", None)
            remaining = room if most is None else most - request.num_output_tokens
            waiting.append(
                Waiting(request_id, request.num_tokens, max(0, min(room, remaining)), max(0, min(limit, room)))
            )
        scheduler_output.num_spec_tokens_to_schedule = control.begin(
            scheduler_output,
            waiting,
            prefill=prefill,
            prefill_left=min(prefill_left, self.max_num_scheduled_tokens),
            budget=max(0, self.max_num_scheduled_tokens - len(waiting)),
        )
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        if self.placeholders:
            for one in waiting:
                request = self.requests[one.request_id]
                request.spec_token_ids = control.cut(one.request_id, request.spec_token_ids)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        drafts = [
            self.length_control.cut(request_id, draft)
            for request_id, draft in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        ]
        for request_id, draft in zip(draft_token_ids.req_ids, drafts, strict=True):
            self._proposed[request_id] = len(draft)
        super().update_draft_token_ids(type(draft_token_ids)(draft_token_ids.req_ids, drafts))  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.length_control.end(scheduler_output, self._came(scheduler_output, model_runner_output))
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _came(self, scheduler_output: Any, model_runner_output: Any) -> Mapping[str, Came]:
        sampled = model_runner_output.sampled_token_ids
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        came = {}
        for request_id in scheduler_output.num_scheduled_tokens:
            index = model_runner_output.req_id_to_index.get(request_id)
            if index is None or not sampled or not sampled[index]:
                continue
            draft = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            if self.placeholders:  # the worker put the real tokens in their places
                verified = len(draft) - invalid.get(request_id, 0)
                proposed = len(draft)
            else:
                verified = int(count_drafts([draft])[0])
                proposed = self._proposed.get(request_id, 0)
            came[request_id] = Came(proposed, verified, len(sampled[index]))
        return came


@functools.cache
def make_schedulers() -> dict[str, type]:
    """`AdaptiveScheduler` and `AdaptiveAsyncScheduler`, by name.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: this vLLM is not the one that they were written for.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

    for base in (Scheduler, AsyncScheduler):
        if problem := scheduler_problem(base, SchedulerOutput):
            raise RuntimeError(f"adaptspec cannot schedule in this vLLM: {problem}")

    class AdaptiveScheduler(AdaptiveLengths, Scheduler):
        """For `--no-async-scheduling` and n-gram drafts."""

    class AdaptiveAsyncScheduler(AdaptiveLengths, AsyncScheduler):
        """For where vLLM schedules ahead, its default with drafters that run on the device."""

        placeholders = True

    return {scheduler.__name__: scheduler for scheduler in (AdaptiveScheduler, AdaptiveAsyncScheduler)}
