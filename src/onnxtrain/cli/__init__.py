"""The command line: arguments in, tables and files out; the work is done by the library."""

from onnxtrain.cli.app import main

__all__ = ["main"]
