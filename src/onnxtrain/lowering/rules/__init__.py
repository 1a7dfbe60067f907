"""Rewrites of graphs, one file for each family of layers: what is found, when it is left alone, what replaces it."""
