"""A package, so that it is found before the script of its name in ``benchmarks/``, wherever that folder stands in the path."""
