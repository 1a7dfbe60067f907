"""Passes that choose native kernels."""
