"""Adapters: small matrices that are trained beside frozen weights, and the files that hold them."""
