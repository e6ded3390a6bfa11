"""The laboratory: the paper's figures and tables, run again; `python -m experiments` or `python -m experiments`."""

from importlib.util import find_spec

_missing = [name for name in ("matplotlib", "scipy") if find_spec(name) is None]
if _missing:
    raise ImportError(
        f"The experiments need matplotlib and scipy. Found no {' and no '.join(_missing)}; install "
        "them with `pip install matplotlib scipy`."
    )
