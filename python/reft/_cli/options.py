"""Kinds of values that options take."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A range that excludes `nan`."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
