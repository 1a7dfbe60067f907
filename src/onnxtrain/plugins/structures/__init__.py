"""Structures that can be removed from a model: channels, heads, hidden units."""
