"""Compile pruned models for kernels that skip zeros."""
