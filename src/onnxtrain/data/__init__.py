"""Training data: from files, arrays and iterables to batches that fit a model."""

from __future__ import annotations

from onnxtrain.data.array_dataset import ArrayDataset, Split, split_validation
from onnxtrain.data.base import Batch, Dataset
from onnxtrain.data.conversion import TensorSpec
from onnxtrain.data.csv_file import CsvFile
from onnxtrain.data.image_folder import ImageFolder
from onnxtrain.data.iterable_dataset import IterableDataset
from onnxtrain.data.map_dataset import MapDataset
from onnxtrain.data.opening import open_dataset
from onnxtrain.data.packing import PackedSequences, pack
from onnxtrain.data.parquet_file import ParquetFile
from onnxtrain.data.tar_file import TarFile
from onnxtrain.data.target_checks import TargetCheck, check_labels
from onnxtrain.data.text_file import TextFile
from onnxtrain.public_names import public_names

__all__ = [
    "ArrayDataset",
    "Batch",
    "CsvFile",
    "Dataset",
    "ImageFolder",
    "IterableDataset",
    "MapDataset",
    "PackedSequences",
    "ParquetFile",
    "Split",
    "TarFile",
    "TargetCheck",
    "TensorSpec",
    "TextFile",
    "check_labels",
    "open_dataset",
    "pack",
    "split_validation",
]

__dir__ = public_names(__name__)
