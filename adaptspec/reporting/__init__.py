"""Reports: what was seen, learnt and decided so far, and why."""

from adaptspec.reporting.making import make_report
from adaptspec.reporting.report import Report

__all__ = ["Report", "make_report"]
