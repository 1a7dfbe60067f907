"""``onnxtrain.data``: data that is read with settings of its own; paths need none. Sequences that are packed."""

from onnxtrain.training.data import CsvFile, ImageFolder, PackedSequences, ParquetFile, TarFile, TextFile, pack

__all__ = ["CsvFile", "ImageFolder", "PackedSequences", "ParquetFile", "TarFile", "TextFile", "pack"]
