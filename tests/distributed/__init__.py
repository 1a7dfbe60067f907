"""A package, so that it is found before the script of its name in ``benchmarks/``, where that folder is in the path."""
