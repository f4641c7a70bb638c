"""What runs on the target's device in every step. Each op is a package `<op>/` with

- `reference.py`: plain torch, the specification, and what runs on a CPU;
- `triton.py`: the same functions as Triton kernels, with the `SPECIALISATIONS` that `ahead_of_time` compiles;
- `__init__.py`: the function to call, which asks `backend` which of the two it is.

Nothing here imports triton before a kernel runs.
"""
