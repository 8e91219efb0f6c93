"""Scaling laws: the Skaling form and Chinchilla's, fitted to tables of runs (appendix "Scaling Law results").

Example:
    >>> from ckda.scaling import fit, paper_table
    >>> table = paper_table().arm("KDA", "CKDA")
    >>> fitted = fit(table, hold_out=("1.7B/50BT",), starts=50)
    >>> for name, arm in fitted.arms.items():
    ...     print(name, f"{arm.held_out_errors()['1.7B/50BT'].value:+.4f}")
    KDA -0.0007
    CKDA +0.0007
"""

from .fit import ArmFit, Fit, Settings, Summary, bootstrap, fit
from .law import FORMS, PARAMETERS, compute, optimal_allocation, optimal_loss, skaling_loss
from .published import downstream, paper_fits, paper_table, parameters, reference_losses
from .store import load_fit
from .table import Table, as_table, read_table

__all__ = [
    "FORMS",
    "PARAMETERS",
    "ArmFit",
    "Fit",
    "Settings",
    "Summary",
    "Table",
    "as_table",
    "bootstrap",
    "compute",
    "downstream",
    "fit",
    "load_fit",
    "optimal_allocation",
    "optimal_loss",
    "paper_fits",
    "paper_table",
    "parameters",
    "read_table",
    "reference_losses",
    "skaling_loss",
]
