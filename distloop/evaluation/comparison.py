"""Comparison: the relative difference of arrays that tests, the audit and the smoke test refer to."""

from typing import Any

import numpy as np


def relative_difference(values: Any, reference: Any, least_norm: float = 1e-30) -> float:
    """Returns ||values - reference|| / max(||reference||, least_norm), with Euclidean norms over all entries.

    Args:
        values: a number or an array; computed in float64.
        reference: as `values`.
        least_norm: the least denominator, for references near 0.

    Returns:
        0.0 for equal arrays, where NaN equals NaN; infinity if the shapes differ, or a difference is not finite.
    """
    values, reference = np.asarray(values, np.float64), np.asarray(reference, np.float64)
    if values.shape != reference.shape:
        return float("inf")
    same = (values == reference) | (np.isnan(values) & np.isnan(reference))
    if not np.isfinite([values[~same], reference[~same]]).all():
        return float("inf")
    norm = float(np.linalg.norm(reference[np.isfinite(reference)]))
    return float(np.linalg.norm(values[~same] - reference[~same])) / max(norm, least_norm)
