"""Training data: from files, arrays and iterables to batches that fit a model."""

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
