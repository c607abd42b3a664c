"""JSON as the engine writes it (serde_json): compact, with its spelling of numbers.

Saved states hold a digest of such a text, and `metrics.jsonl` is part of a result.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import numpy as np


def json_text(value: Any) -> str:
    """Compact JSON in the order of the fields; `null` for a number that is not finite. `numpy.float32` keeps its shortest form."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json_text(str(key))}:{json_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(json_text(item) for item in value) + "]"
    if isinstance(value, np.float32):
        return _number(value, fixed=range(-6, 13))
    if isinstance(value, float):
        return _number(value, fixed=range(-5, 16))
    return json.dumps(value, ensure_ascii=False)


def _number(value: float | np.float32, fixed: range) -> str:
    """The shortest digits that give the number back; with an exponent where that is not in `fixed`."""
    if not math.isfinite(value):
        return "null"
    sign, digits, exponent = Decimal(str(value)).as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits)).rstrip("0") or "0"
    exponent += len(digits) - len(text)
    scientific = exponent + len(text) - 1 if text != "0" else 0
    minus = "-" if sign else ""
    if text == "0":
        return f"{minus}0.0"
    if scientific not in fixed:
        mantissa = text if len(text) == 1 else f"{text[0]}.{text[1:]}"
        return f"{minus}{mantissa}e{'+' if scientific > 0 else ''}{scientific}"
    if exponent >= 0:
        return f"{minus}{text}{'0' * exponent}.0"
    if scientific < 0:
        return f"{minus}0.{'0' * (-scientific - 1)}{text}"
    return f"{minus}{text[:exponent]}.{text[exponent:]}"
