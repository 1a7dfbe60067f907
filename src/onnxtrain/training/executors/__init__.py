"""Executors run the steps of a training: of one process, of data-parallel ranks, and of ranks that share the states."""
