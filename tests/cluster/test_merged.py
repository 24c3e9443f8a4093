"""What replicas of one service must have in common, and what they had better have."""

from __future__ import annotations

from dataclasses import replace

from jlora.cluster import merged
from tests.cluster._links import INFO


def test_replicas_of_another_model_or_type_are_told_apart():
    assert not merged.difference(INFO, INFO)
    assert merged.difference(INFO, replace(INFO, dtype="bfloat16")) == "dtype 'bfloat16', not 'float32'"


def test_replicas_that_add_in_another_order_are_named():
    other = replace(INFO, config=replace(INFO.config, engine=replace(INFO.config.engine, one_row="on")))
    assert not merged.rounding(INFO, INFO) and not merged.difference(INFO, other)
    assert merged.rounding(INFO, other) == "engine.one_row = 'on', not 'auto'"
