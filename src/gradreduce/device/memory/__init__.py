"""Memory: Buffers and their blocks, dtypes, peers, and when freed memory is used again."""
