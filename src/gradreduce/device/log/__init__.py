"""The log of operations, and its trace file."""
