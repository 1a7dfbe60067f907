"""Training data: from files, arrays and iterables to batches that fit a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtrain.lazy import lazy_names, public_names

if TYPE_CHECKING:
    from onnxtrain.training.data.array_dataset import ArrayDataset, Split, split_validation
    from onnxtrain.training.data.base import Batch, Dataset
    from onnxtrain.training.data.conversion import TensorSpec
    from onnxtrain.training.data.csv_file import CsvFile
    from onnxtrain.training.data.image_folder import ImageFolder
    from onnxtrain.training.data.iterable_dataset import IterableDataset
    from onnxtrain.training.data.map_dataset import MapDataset
    from onnxtrain.training.data.opening import open_dataset
    from onnxtrain.training.data.packing import PackedSequences, pack
    from onnxtrain.training.data.parquet_file import ParquetFile
    from onnxtrain.training.data.tar_file import TarFile
    from onnxtrain.training.data.target_checks import TargetCheck, check_labels
    from onnxtrain.training.data.text_file import TextFile

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
__getattr__ = lazy_names(
    __name__,
    {
        "ArrayDataset": "onnxtrain.training.data.array_dataset",
        "Batch": "onnxtrain.training.data.base",
        "check_labels": "onnxtrain.training.data.target_checks",
        "CsvFile": "onnxtrain.training.data.csv_file",
        "Dataset": "onnxtrain.training.data.base",
        "ImageFolder": "onnxtrain.training.data.image_folder",
        "IterableDataset": "onnxtrain.training.data.iterable_dataset",
        "MapDataset": "onnxtrain.training.data.map_dataset",
        "open_dataset": "onnxtrain.training.data.opening",
        "pack": "onnxtrain.training.data.packing",
        "PackedSequences": "onnxtrain.training.data.packing",
        "ParquetFile": "onnxtrain.training.data.parquet_file",
        "Split": "onnxtrain.training.data.array_dataset",
        "split_validation": "onnxtrain.training.data.array_dataset",
        "TarFile": "onnxtrain.training.data.tar_file",
        "TargetCheck": "onnxtrain.training.data.target_checks",
        "TensorSpec": "onnxtrain.training.data.conversion",
        "TextFile": "onnxtrain.training.data.text_file",
    },
)
