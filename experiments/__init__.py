"""The laboratory: every figure and table of the paper, run again; `python -m experiments` or `nwise reproduce`."""
