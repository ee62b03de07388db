"""Chunks out of one store and into another, by way of files that any reader of safetensors understands."""

from .exporting import ExportReport, export_chunks
from .importing import ImportReport, import_chunks

__all__ = ["ExportReport", "ImportReport", "export_chunks", "import_chunks"]
