"""A package, so that imports find it before the script of the same name in ``benchmarks/``."""
