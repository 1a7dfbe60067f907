"""Training data: from files, arrays and iterables to batches that fit a model."""

from __future__ import annotations

from onnxtrain.data.array_dataset import ArrayDataset as ArrayDataset
from onnxtrain.data.array_dataset import Split as Split
from onnxtrain.data.array_dataset import split_validation as split_validation
from onnxtrain.data.base import Batch as Batch
from onnxtrain.data.base import Dataset as Dataset
from onnxtrain.data.conversion import TensorSpec as TensorSpec
from onnxtrain.data.csv_file import CsvFile
from onnxtrain.data.images import ImageFolder
from onnxtrain.data.iterable_dataset import IterableDataset as IterableDataset
from onnxtrain.data.map_dataset import MapDataset as MapDataset
from onnxtrain.data.opening import open_dataset as open_dataset
from onnxtrain.data.packing import PackedSequences, pack
from onnxtrain.data.parquet_file import ParquetFile
from onnxtrain.data.tar_file import TarFile
from onnxtrain.data.target_checks import TargetCheck as TargetCheck
from onnxtrain.data.target_checks import check_labels as check_labels
from onnxtrain.data.text_file import TextFile
from onnxtrain.errors._internal import public_names

__all__ = ["CsvFile", "ImageFolder", "PackedSequences", "ParquetFile", "TarFile", "TextFile", "pack"]

__dir__ = public_names(__name__)
