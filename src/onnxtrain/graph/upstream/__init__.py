"""Upstream bugs: their registry, and the workarounds that belong to no rule or pass."""
