"""Skipped as a whole where langchain-core is not installed."""

import pytest

pytest.importorskip("langchain_core")
