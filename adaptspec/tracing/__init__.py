"""Recording position-indexed traces on a live target: every drafter is asked at every position of its own output."""

from adaptspec.tracing.recorder import TracePrompt, TraceRecorder, check_traceable, measured_costs, record_trace

__all__ = ["TracePrompt", "TraceRecorder", "check_traceable", "measured_costs", "record_trace"]
