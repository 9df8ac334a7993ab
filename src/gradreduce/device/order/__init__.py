"""Order: which queue waits for which, from the operands of the operations."""
