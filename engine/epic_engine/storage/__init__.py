"""Where compiled chunks are kept: in memory, or in one directory of files."""
