"""Skipped as a whole where llama-index-core is not installed."""

import pytest

pytest.importorskip("llama_index.core")
