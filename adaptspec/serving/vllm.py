"""vLLM: the names to give it. Nothing of vLLM is imported before vLLM itself asks for one of them.

- `AdaptiveProposer`: `--speculative-config '{"method": "custom_class", "model":
  "adaptspec.serving.vllm.AdaptiveProposer", "num_speculative_tokens": 8}'`
- `AdaptiveScheduler`, `AdaptiveAsyncScheduler`: `--scheduler-cls adaptspec.serving.vllm.AdaptiveScheduler`, with
  vLLM's own drafters.
- `register`: the plugin, found by vLLM through the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

from typing import Any

from adaptspec.serving.vllm_capture import register as register

_SCHEDULERS = ("AdaptiveScheduler", "AdaptiveAsyncScheduler")


def __getattr__(name: str) -> Any:
    if name == "AdaptiveProposer":
        from adaptspec.serving.vllm_proposer import AdaptiveProposer

        return AdaptiveProposer
    if name in _SCHEDULERS:
        from adaptspec.serving.vllm_scheduler import make_schedulers

        return make_schedulers()[name]
    raise AttributeError(f"module 'adaptspec.serving.vllm' has no attribute {name!r}")
