"""Linear programmes by HiGHS."""

import math
import time
from dataclasses import dataclass

import highspy
import numpy as np

STRATEGIES = (1, 4)
"""Strategies of HiGHS in order: dual simplex, then primal."""
_FAILURES = (highspy.HighsModelStatus.kUnknown, highspy.HighsModelStatus.kSolveError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A vertex of the programme.

    Attributes:
        value: the objective.
    """

    value: float
    x: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMatrix:
    """The entries of a programme's constraints, line by line.

    Attributes:
        starts: first entry of each line, and the number of entries.
        index: place of each entry in its line.
        value: its value.
        by_row: whether a line is a row; else it is a column.
    """

    starts: np.ndarray
    index: np.ndarray
    value: np.ndarray
    by_row: bool


def minimise(
    cost: np.ndarray,
    matrix: SparseMatrix,
    row_lower: np.ndarray,
    row_upper: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
    until: float = math.inf,
) -> Solution | None:
    """Return the optimum by the simplex method, which ends in a vertex; None if infeasible.

    Near the least feasible budget the dual simplex may fail, and the primal one is tried next. A programme without
    costs only tests feasibility; it counts as infeasible if both fail.

    Args:
        until: end of the time for it, in seconds of `time.perf_counter`.

    Raises:
        TimeoutError: there is no optimum by then.
        AssertionError: HiGHS fails with every strategy of `STRATEGIES`, and there are costs.
    """
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("random_seed", 0)
    highs.setOptionValue("solver", "simplex")
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), len(row_lower)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
    lp.row_lower_, lp.row_upper_ = row_lower, row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise if matrix.by_row else highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = matrix.starts
    lp.a_matrix_.index_ = matrix.index
    lp.a_matrix_.value_ = matrix.value
    highs.passModel(lp)
    for strategy in STRATEGIES:
        highs.setOptionValue("simplex_strategy", strategy)
        highs.clearSolver()
        highs.setOptionValue("time_limit", max(0.0, until - time.perf_counter()))
        highs.run()
        status = highs.getModelStatus()
        if status not in _FAILURES:
            break
    if status == highspy.HighsModelStatus.kTimeLimit:
        raise TimeoutError(f"a linear programme of {len(cost):,} variables took too long")
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return None
    if status in _FAILURES and not cost.any():
        return None
    assert status == highspy.HighsModelStatus.kOptimal, status
    return Solution(value=highs.getInfo().objective_function_value, x=np.array(highs.getSolution().col_value))
