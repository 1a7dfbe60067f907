"""Passes that save memory."""
