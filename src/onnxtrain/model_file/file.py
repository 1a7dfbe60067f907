"""A user's model file: read, checked, upgraded for training, and written back with new weights."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.model_file.checks import check_model, dense_array
from onnxtrain.model_file.embedded_weights import EMBEDDED, EmbeddedWeight, fill, fill_tensor, lift, with_embedded
from onnxtrain.model_file.external import (
    DataFiles,
    DataTensor,
    ExternalData,
    data_bytes,
    drop_location,
    external_tensors,
    raw_array,
    with_external_data,
)
from onnxtrain.model_file.hub import download, is_on_hub
from onnxtrain.model_file.large_data import BackgroundRead, LargeData, SourceFile, Stamp, stamp_of
from onnxtrain.model_file.proto import OPSET_OF_NONE, default_opset, drop_initializer_inputs, is_large, without_data
from onnxtrain.model_file.protobuf_wire import CutOffError, Template, TooManyFieldsError, WireError
from onnxtrain.model_file.protobuf_wire import Path as FieldPath
from onnxtrain.model_file.saving import (
    Change,
    DataFile,
    check_shared,
    check_value,
    refuse_node,
    save_model,
    stored_bytes,
)
from onnxtrain.model_file.small_files import RefusedFileError, read_json
from onnxtrain.model_file.working_copy import understood, working_copy
from onnxtrain.model_file.writing import check_writable, reason, resolve_output

_MAXIMUM_BYTES = (1 << 31) - 1
"""Size limit of protocol buffers."""

_MAPPED_FROM = 1 << 24
"""Bytes from which a file is mapped, not read."""


def serialised(model: ModelProto) -> bytes:
    """Serialize a model."""
    try:
        return bytes(model.SerializeToString())
    except (EncodeError, ValueError) as error:
        raise ModelError(
            "The model is larger than 2 GiB, which protocol buffers cannot hold; "
            "save it with external data and give the path."
        ) from error


def find_model(path: str | os.PathLike[str]) -> Path:
    """Return the model file of a path: the path itself, or the model in a folder of onnxruntime-genai.

    The model in a folder is the one that genai_config.json names, else model.onnx. An address such as
    ``hf://org/name/model.onnx`` is downloaded from the Hugging Face Hub.
    """
    if is_on_hub(path):
        return download(path)
    path = Path(path)
    if not path.is_dir():
        return path
    name = "model.onnx"
    with contextlib.suppress(OSError, RefusedFileError, KeyError, TypeError):
        name = str(read_json(path / "genai_config.json", finite=False)["model"]["decoder"]["filename"])
    found = path / name
    return found if found.is_file() and found.parent == path else path


def read_file(path: Path) -> tuple[bytes | mmap.mmap, Stamp]:
    """Return the bytes of a file and its stamp. A large file is mapped."""
    label = repr(str(path))
    try:
        _check_regular(path, os.stat(path))  # before opening, which would block on a pipe
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            _check_regular(path, status)
            if status.st_size > _MAXIMUM_BYTES:
                raise ModelError(
                    f"{label} is larger than 2 GiB, which an ONNX file cannot be; large weights must be external data."
                )
            if status.st_size > _MAPPED_FROM:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), stamp_of(status)
            data = file.read(_MAPPED_FROM)  # bounded, since files in /proc report size 0
    except FileNotFoundError as error:
        raise ModelError(f"There is no file {label}; check the path.").about(label) from error
    except OSError as error:
        raise ModelError(f"{label} cannot be read: {reason(error, 'check the file')}.") from error
    except ValueError as error:  # a NUL character
        raise ModelError(f"There is no file {label}, since no file can have this name; check the path.").about(
            label
        ) from error
    if not data:
        raise ModelError(f"{label} is empty; an ONNX model is needed.")
    return data, stamp_of(status)


def _of_folder(path: Path) -> str:
    """Return the sentence of an error for a folder without a model that :func:`find_model` knows."""
    names = sorted(file.name for file in path.iterdir())
    weights = next((name for name in names if name.endswith((".safetensors", "pytorch_model.bin"))), None)
    if weights is None or any(name.endswith(".onnx") for name in names):
        return f"{str(path)!r} is a folder; give the model file in it."
    return (
        f"{str(path)!r} is a checkpoint of PyTorch ({weights}) without an ONNX model; export it first "
        "(torch.onnx.export, or for language models python -m onnxruntime_genai.models.builder)."
    )


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(_of_folder(path))
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{str(path)!r} is a device, a pipe or a socket, which may have no end; give a file.").about(
            str(path)
        )


def parse_file(path: Path, data: bytes | mmap.mmap) -> tuple[ModelProto, Template, dict[str, slice]]:
    """Return the model without the raw data of large initializers, its template, and the ranges of that data."""
    label = repr(str(path))
    no_model = f"{label} is not an ONNX model: it starts with {data[:8]!r}; give a file that an ONNX exporter wrote."
    try:
        template = Template(data)
    except CutOffError as error:
        # Exporters write the IR version first: field 1, a small integer.
        if data[0] == 0x08 and len(data) > 1 and 0 < data[1] < 0x80:
            raise ModelError(
                f"{label} is cut off: it has {len(data)} bytes and the model in it is longer; copy it again."
            ) from error
        raise ModelError(no_model) from error
    except TooManyFieldsError as error:
        raise ModelError(
            f"{label} has more fields than any model, probably since its values are stored one by one; export it "
            "again, with raw data."
        ) from error
    except WireError as error:
        raise ModelError(no_model) from error
    try:
        proto: ModelProto = ModelProto.FromString(template.light())
    except DecodeError as error:
        if "MaxDepth" in str(error):
            raise ModelError(
                f"{label} nests the bodies of If, Loop and Scan deeper than protocol buffers read; "
                "export it with fewer levels."
            ).about(label) from error
        raise ModelError(no_model) from error
    if not proto.ir_version:
        raise ModelError(no_model)
    return proto, template, ranges_by_name(proto, template)


def ranges_by_name(proto: ModelProto, template: Template) -> dict[str, slice]:
    """Return the byte ranges of large initializers' raw data, by name."""
    return {proto.graph.initializer[index].name: span for index, span in template.large().items()}


class ModelFile:
    """A user's model as given, written back with new weights and no other change.

    `save` writes the bytes of the file with the data of initializers replaced, in their original storage (raw or typed
    field, external file at its offset). The model is not serialized again, which would normalize it (see
    `protobuf_wire`).

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n] x) => (float[n] y) <float w = {2}> { y = Mul(x, w) }''')
        >>> file = ModelFile.load(model)
        >>> file.names(), file.value("w").item(), file.opset
        (['w'], 2.0, 18)
    """

    def __init__(
        self,
        proto: ModelProto,
        template: Template,
        path: Path | None,
        folder: Path | None,
        large: LargeData | None = None,
        origin: ModelFile | None = None,
        embedded: Sequence[EmbeddedWeight] = (),
        *,
        ahead: bool = False,
    ) -> None:
        self.path = path
        self.folder = folder
        self._home: Path | None = path if origin is None else origin._home
        self._moved: dict[str, str] = {} if origin is None else origin._moved
        self.proto = proto
        self._label = "The model" if path is None else repr(str(path))
        self._template = template
        self._large = large or LargeData()
        try:
            self._external, everywhere = check_model(self._label, proto, template, folder, self._moved)
        except UnicodeDecodeError as error:  # protocol buffers decode strings at access
            raise ModelError(
                f"{self._label} is damaged: it has a name that is not UTF-8 text; copy it again."
            ) from error
        self._embedded = {item.name: item for item in embedded}
        self._positions = {tensor.name: index for index, tensor in enumerate(proto.graph.initializer)}
        self._ranges: dict[str, list[ExternalData]] = {}  # of the tensors in each data file
        for data in everywhere:
            self._ranges.setdefault(data.file, []).append(data)
        self._located = dict(zip(map(_place_of, external_tensors(proto)), everywhere, strict=True))
        self._data_files: DataFiles = DataFiles() if origin is None else origin._data_files
        if origin is None:
            self._data_files.hold(data.path for data in everywhere)
        if ahead:
            self._data_files.read_ahead(everywhere)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | ModelProto,
        *,
        folder: str | os.PathLike[str] | None = None,
        lent: bool = False,
    ) -> ModelFile:
        """Read and check a model."""
        if isinstance(model, ModelProto):
            data = serialised(model)
            template, embedded = with_embedded(model, Template(data), data)
            home = None if folder is None else Path(folder)
            return cls(model, template, None, home, embedded=embedded, ahead=lent)
        if not isinstance(model, str | os.PathLike):
            raise ModelError(f"The model is a {type(model).__name__}; it needs a path or an onnx.ModelProto.")
        path = find_model(model)
        mapped, stamp = read_file(path)
        proto, template, ranges = parse_file(path, mapped)
        origin = SourceFile(path, stamp, ranges)
        background = BackgroundRead.of(origin) if lent and ranges and isinstance(mapped, mmap.mmap) else None
        template, embedded = with_embedded(proto, template, mapped)
        large = LargeData(mapped, ranges, origin, lent=lent and isinstance(mapped, bytes), background=background)
        return cls(proto, template, path, path.parent, large, embedded=embedded, ahead=lent)

    @property
    def home(self) -> Path | None:
        """The file that the model comes from, also where it was changed in memory; ``None`` without one."""
        return self._home

    def changed(self, proto: ModelProto) -> ModelFile:
        """Wrap a model that was derived from `whole`; initializers that kept their names have unchanged data."""
        drop_initializer_inputs(proto)
        data = serialised(proto)
        template = Template(data)
        light = ModelProto.FromString(template.light())
        large = LargeData(data, ranges_by_name(light, template), self._large.source)
        template, embedded = with_embedded(light, template, data)
        return ModelFile(light, template, None, self.folder, large, self, embedded)

    def whole(self, *, without: Container[str] = ()) -> ModelProto:
        """Return a copy of the model with all inline data, except that of some initializers."""
        proto = ModelProto()
        proto.CopyFrom(self.proto)
        for tensor in proto.graph.initializer:
            if tensor.name in self._large and tensor.name not in without:
                tensor.raw_data = bytes(self._large.read(tensor.name))
        return proto

    def inlined(self, *, without: Container[str] = ()) -> ModelProto:
        """Return a copy of the model with all data inline, except that of some initializers."""
        proto = self.whole(without=without)
        for tensor in proto.graph.initializer:
            if tensor.name in without:
                drop_location(tensor)
        return with_external_data(proto, self.folder, self._bytes_of)

    def filled(self, values: Mapping[str, npt.NDArray[np.generic]]) -> ModelProto:
        """Return the model that :meth:`save` writes, with all data inline and sparse initializers dense."""
        dense = self.dense()
        proto = dense.inlined(without=values)
        for tensor in proto.graph.initializer:
            if tensor.name in values:
                fill_tensor(tensor, values[tensor.name])
        for name, item in dense._embedded.items():
            if name in values:
                fill(proto, item, values[name])
        return proto

    def release(self, names: Iterable[str]) -> None:
        """Free the memory of initializers whose values a training has copied.

        Later accesses read the file again, while it is unchanged. A model that was given as an object, or that has
        sparse initializers (saving rebuilds it), keeps its data.
        """
        given = [] if self.proto.graph.sparse_initializer else list(names)
        self._large.release(given)
        for name in self._external.keys() & given:
            self._data_files.drop(self._external[name])

    def take(self, value: npt.NDArray[np.generic]) -> npt.NDArray[np.generic] | None:
        """Release the initializer whose memory an array from :meth:`value` views, and transfer that memory."""
        if self.proto.graph.sparse_initializer:
            return None
        taken = self._large.take(value)
        return self._data_files.take(value) if taken is None else taken

    @property
    def opset(self) -> int:
        """Opset of the default domain ("" or "ai.onnx"), also where the model needs none."""
        return default_opset(self.proto.opset_import) or OPSET_OF_NONE

    def names(self) -> list[str]:
        """Return the names of the main graph's initializers in order, without sparse ones."""
        return list(self._positions)

    def declared(self, name: str) -> TensorProto:
        """Return an initializer of the model, possibly without its data."""
        if name in self._embedded:
            return self._embedded[name].tensor
        if name not in self._positions:
            raise ModelError(f"The model has no initializer named {name!r}; `names` lists those that it has.").about(
                name
            )
        tensor: TensorProto = self.proto.graph.initializer[self._positions[name]]
        return tensor

    def value(self, name: str) -> npt.NDArray[np.generic]:
        """Return an initializer's values as a read-only array; sparse data is made dense."""
        sparse = next((each for each in self.proto.graph.sparse_initializer if each.values.name == name), None)
        if sparse is not None:
            array = dense_array(sparse)
            array.flags.writeable = False
            return array
        tensor = self.declared(name)
        if name in self._external:
            data = self._external[name]
            array = self._data_files.array(tensor, data, self._path_of(data.file))
        elif name in self._large:
            raw = self._large.read(name)
            array = raw_array(tensor, raw, 0, len(raw))
        else:
            array = numpy_helper.to_array(tensor)
        array.flags.writeable = False
        return array

    def _where(self, name: str) -> ExternalData:
        """Return the current location of an external initializer's data."""
        data = self._external[name]
        location = self._moved.get(data.file)
        return data if location is None else data._replace(location=location, path=self._path_of(data.file))

    def _bytes_of(self, tensor: TensorProto) -> memoryview:
        """Return the data of an external tensor of this model, or of a copy of it."""
        data = self._located[_place_of(tensor)]
        return self._data_files.bytes(data, self._path_of(data.file))

    def _path_of(self, file: str) -> Path:
        """Return the path of a data file, given its location in the model."""
        return (self.folder or Path()) / self._moved.get(file, file)

    def training_model(self, minimum_opset: int = 18) -> ir.Model:
        """Return a working copy for training.

        Initializers keep their names. Large ones are not copied: they refer to the tensors of this model, or to its
        data files, which are mapped when they are read. Weights in Constant nodes, attributes and bodies become
        initializers (see `embedded_weights`). Initializers are no graph inputs, and sparse ones are dense. A ZipMap
        becomes an Identity. The domain "ai.onnx" is written "". Nodes are sorted. Functions stay.
        """
        with understood(self._label):
            # the remaining external data is in attributes and bodies, where it is not mapped
            proto = with_external_data(without_data(self.proto), self.folder, self._bytes_of)
            lift(proto, list(self._embedded.values()))
            folder = "" if self.folder is None else str(self.folder)
            large = {
                tensor.name: self._working_tensor(tensor, folder)
                for tensor in self.proto.graph.initializer
                if is_large(tensor)
            }
            model = working_copy(self._label, proto, large, folder, minimum_opset)
        for item in self._embedded.values():
            if item.name in model.graph.initializers:
                model.graph.initializers[item.name].metadata_props[EMBEDDED] = item.named
        return model

    def _working_tensor(self, tensor: TensorProto, folder: str) -> ir.TensorProtocol:
        """Return a large initializer of a working copy, whose data is read when it is needed."""
        name = tensor.name
        if name in self._external:
            return DataTensor(
                tensor, lambda: self._where(name), lambda: self.value(name), lambda: self._bytes_of(tensor), folder
            )
        dtype = ir.DataType(tensor.data_type)
        if name not in self._large:
            # wrapped, so that renaming it does not rename the user's tensor
            found = ir.serde.deserialize_tensor(tensor, folder)
            if dtype == ir.DataType.STRING:
                return found
            return ir.LazyTensor(lambda: found, dtype, ir.Shape(tensor.dims), name=name)
        return ir.LazyTensor(
            lambda: ir.Tensor(self.value(name), dtype=dtype, name=name), dtype, ir.Shape(tensor.dims), name=name
        )

    def dense(self) -> ModelFile:
        """Return the model with its sparse initializers stored dense; itself if it has none."""
        if not self.proto.graph.sparse_initializer:
            return self
        proto = self.whole()
        for sparse in proto.graph.sparse_initializer:
            proto.graph.initializer.append(numpy_helper.from_array(dense_array(sparse), sparse.values.name))
        del proto.graph.sparse_initializer[:]
        return self.changed(proto)

    def replace_by(self, path: str | os.PathLike[str], data: bytes) -> None:
        """Write another model's bytes to a file, as :meth:`save` does; data files of this model stay."""
        save_model(path, {}, lambda moved: [data], sources=self._data_files, keep=map(self._path_of, self._ranges))

    def check_writable(self, path: str | os.PathLike[str]) -> None:
        """Make sure, before training, that `save` can write to a path."""
        check_writable(path)
        output = resolve_output(path)
        if self._ranges and output.is_node:
            refuse_node(Path(path))

    def save(
        self,
        path: str | os.PathLike[str],
        values: Mapping[str, npt.NDArray[np.generic]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the model with new values for some initializers; every other byte is as it was.

        Data files are written beside the new model and named after it (``tuned.onnx.data``), whatever they were called.
        If the file exists, they get new names (``tuned.onnx.<hex>.data``), which the model records: the old model stays
        complete until a single rename replaces it. Then the old data files that onnxtrain wrote for this path are
        removed. Saving over the model itself works. Values are those that were read: bytes of a data file that changed
        meanwhile come from memory.
        """
        added = self._added_metadata(metadata or {})
        if any(sparse.values.name in values for sparse in self.proto.graph.sparse_initializer):
            self.dense().save(path, values, metadata)
            return
        inline: dict[int, npt.NDArray[np.generic]] = {}
        inner: dict[FieldPath, tuple[TensorProto, npt.NDArray[np.generic]]] = {}
        late: dict[int, Callable[[], bytes | memoryview]] = {}  # made when they are written
        changes: dict[str, list[Change]] = {}
        large = self._template.large()
        for name in values:
            tensor = self.declared(name)
            stored = partial(stored_bytes, tensor, values, name)
            if name in self._external:
                data = self._external[name]
                changes.setdefault(data.file, []).append(Change(data.offset, data.length, stored))
            elif name not in self._embedded and self._positions[name] in large:
                late[self._positions[name]] = stored
            else:
                array = values[name]
                check_value(tensor, array)
                if name in self._embedded:
                    inner[self._embedded[name].path] = (tensor, self._embedded[name].stored(array))
                else:
                    inline[self._positions[name]] = array
        check_shared(self._external, values)
        self.check_writable(path)

        def raw_data(index: int) -> bytes | memoryview:
            if index in late:
                return late[index]()
            tensor = self.proto.graph.initializer[index]
            return bytes(self._large.read(tensor.name)) if tensor.name in self._large else bytes(tensor.raw_data)

        def render(moved: Mapping[str, str]) -> Iterator[bytes | memoryview]:
            spelled = {data.location: moved[file] for file, ranges in self._ranges.items() for data in ranges if moved}
            initializers = list(self.proto.graph.initializer)
            yield from self._template.render(initializers, inline, raw_data, spelled, inner)
            yield added

        files = {file: self._data_file(file, changes.get(file, ())) for file in self._ranges}
        over_itself = self._is_own(Path(path))
        keep = [] if over_itself else [item.source for item in files.values()]
        moved = save_model(path, files, render, sources=self._data_files, keep=keep)
        if over_itself:
            self._moved.update(moved)
            self._data_files.hold(map(self._path_of, self._ranges))
            for name in self._external.keys() & values.keys():
                self._data_files.drop(self._external[name])

    def _data_file(self, file: str, changes: Sequence[Change]) -> DataFile:
        """Return what a data file is written from: the file, its new values, and those that were read ahead."""
        ranges = {(data.offset, data.end): data for data in self._ranges[file] if data.length}
        given = {(change.offset, change.offset + change.length) for change in changes}
        others = [data for span, data in ranges.items() if span not in given]
        held = [data for data in others if self._data_files.held(data) is not None]
        return DataFile(
            self._path_of(file),
            max(data.end for data in self._ranges[file]),
            changes,
            [Change(data.offset, data.length, partial(self._data_files.bytes, data)) for data in held],
            len(held) == len(others),
        )

    def _added_metadata(self, entries: Mapping[str, str]) -> bytes:
        """Return the bytes of new metadata entries, to append to those of the model."""
        known, added = {entry.key: entry.value for entry in self.proto.metadata_props}, ModelProto()
        for key, text in entries.items():
            if known.get(key, text) != text:
                raise ModelError(
                    f"The metadata of {self._label} has another entry {key!r} already, "
                    f"{known[key][:40]!r}; save without it."
                ).about(key, got=known[key])
            if key not in known:
                added.metadata_props.add(key=key, value=text)
        data: bytes = added.SerializeToString()
        return data

    def _is_own(self, target: Path) -> bool:
        """Return whether a path is the file that the model was read from, in the same folder."""
        home = self._home
        return (
            home is not None
            and home.exists()
            and target.exists()
            and os.path.samefile(home, target)
            and os.path.samefile(home.parent, target.parent)
        )


def _place_of(tensor: TensorProto) -> tuple[str, ...]:
    """Return the entries of an external tensor that say where its data is, and its type and shape."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return *(entries.get(key, "") for key in ("location", "offset", "length")), str(data_bytes(tensor))
