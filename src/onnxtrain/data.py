"""``onnxtrain.data``: files that are read with settings of their own; paths to them need none."""

from onnxtrain.training.data import CsvFile, ImageFolder, ParquetFile, TarFile, TextFile

__all__ = ["CsvFile", "ImageFolder", "ParquetFile", "TarFile", "TextFile"]
