"""Passes for graphs that any runtime runs."""
