"""Experiments: one runner on Ray, one folder per experiment, one report.

    python -m experiments.run regret --quick
    python -m experiments.report runs/regret-*

See `experiments/README.md`.
"""
