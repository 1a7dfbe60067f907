"""A user's model file: read, understood, upgraded for training, and written back with new weights."""

from __future__ import annotations

import mmap
import os
import posixpath
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx import ModelProto, TensorProto, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.model_file.background import BackgroundRead
from onnxtrain.model_file.checks import check_model
from onnxtrain.model_file.data_files import DataFiles, DataTensor, raw_array
from onnxtrain.model_file.embedded_weights import Hidden, fill, fill_tensor, lift, with_hidden
from onnxtrain.model_file.external import ExternalData
from onnxtrain.model_file.large import LargeData
from onnxtrain.model_file.origin import Origin
from onnxtrain.model_file.protobuf_wire import Template
from onnxtrain.model_file.reading import parse_file, places_by_name, read_file, serialised
from onnxtrain.model_file.saving import (
    DataFile,
    NewValues,
    check_shared,
    fresh_locations,
    inside,
    refuse_node,
    save_model,
)
from onnxtrain.model_file.self_contained import with_external_data
from onnxtrain.model_file.skeleton import default_opset, is_large, without_data
from onnxtrain.model_file.sparse_tensors import dense_array
from onnxtrain.model_file.working import understood, working_copy
from onnxtrain.model_file.writing import check_writable, resolve_output

__all__ = ["ModelFile", "check_writable"]


class ModelFile:
    """A user's model as given, written back with new weights and nothing else changed.

    External data is not read: initializers that have it are memory-mapped when their values are asked for.

    What `save` writes is the file's own bytes with the data of initializers replaced, in the storage that they
    had (raw or typed field, external file at its offset). The model is not serialised again, since that
    normalises what files may contain: the order of fields, packed lists, fields of newer versions (see `wire`).

    Args:
        proto: The model; never changed.
        template: Its bytes.
        path: Where they came from.
        folder: Where its external data is.
        large: Data that is not in ``proto``.
        origin: What this one was made from; they share the data files, and where these have moved.
        hidden: Weights that are no initializers of the main graph; the template is cut there, too.

    Attributes:
        path: The file, ``None`` for a model that was given as an object.
        folder: Where external data is, ``None`` where that is not known.
        proto: The model as given, without its external data; of a file also without the raw data of large
            initializers, which :meth:`whole` has.

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
        hidden: Sequence[Hidden] = (),
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
        except UnicodeDecodeError as error:  # protocol buffers look at strings only when they are read
            raise ModelError(
                f"{self._label} is damaged: it has a name that is not UTF-8 text; copy it again."
            ) from error
        self._hidden = {item.name: item for item in hidden}
        self._positions = {tensor.name: index for index, tensor in enumerate(proto.graph.initializer)}
        self._sizes: dict[str, int] = {}  # of data files: up to which byte tensors reach
        for data in everywhere:
            self._sizes[data.file] = max(data.end, self._sizes.get(data.file, 0))
        self._locations = {data.location for data in everywhere}
        self._data_files = DataFiles()
        self._data_files.hold(data.path for data in everywhere)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | ModelProto,
        *,
        folder: str | os.PathLike[str] | None = None,
        lent: bool = False,
    ) -> ModelFile:
        """Read and check a model.

        Args:
            model: A path, or a model in memory (which must not be changed afterwards).
            folder: Where the external data of a model in memory is; a file's is in its own folder.
            lent: For whoever calls :meth:`release` soon. Large initializers of a large file are read in the background,
                and waited for when the first of them is asked for.

        Raises:
            ModelError: There is no such file, it is no ONNX model, or not one that can be used; the message
                says what is wrong.
        """
        if isinstance(model, ModelProto):
            data = serialised(model)
            template, hidden = with_hidden(model, Template(data), data)
            return cls(model, template, None, None if folder is None else Path(folder), hidden=hidden)
        path = Path(model)
        mapped, stamp = read_file(path)
        proto, template, places = parse_file(path, mapped)
        origin = Origin(path, stamp, places)
        background = BackgroundRead.of(origin) if lent and places and isinstance(mapped, mmap.mmap) else None
        template, hidden = with_hidden(proto, template, mapped)
        large = LargeData(mapped, places, origin, lent=lent and isinstance(mapped, bytes), background=background)
        return cls(proto, template, path, path.parent, large, hidden=hidden)

    def changed(self, proto: ModelProto) -> ModelFile:
        """The file of a model that was made from `whole`: initializers that kept their names have kept their data.

        Raises:
            ModelError: It is too large for protocol buffers, or cannot be used.
        """
        data = serialised(proto)
        template = Template(data)
        light = ModelProto.FromString(template.light())
        large = LargeData(data, places_by_name(light, template), self._large.origin)
        template, hidden = with_hidden(light, template, data)
        return ModelFile(light, template, None, self.folder, large, self, hidden)

    def whole(self, *, without: Container[str] = ()) -> ModelProto:
        """A copy of the model with all its data but the external, and that of some initializers."""
        proto = ModelProto()
        proto.CopyFrom(self.proto)
        for tensor in proto.graph.initializer:
            if tensor.name in self._large and tensor.name not in without:
                tensor.raw_data = bytes(self._large.read(tensor.name))
        return proto

    def inlined(self, *, without: Container[str] = ()) -> ModelProto:
        """A copy of the model with all its data inside, but that of some initializers.

        Raises:
            ModelError: A data file cannot be read.
        """
        proto = self.whole(without=without)
        for tensor in proto.graph.initializer:
            if tensor.name in without:
                tensor.ClearField("external_data")
                tensor.ClearField("data_location")
        return with_external_data(proto, self.folder, self._moved)

    def filled(self, values: Mapping[str, npt.NDArray[np.generic]]) -> ModelProto:
        """Return the model that :meth:`save` writes, in memory, with all data inside and sparse initializers dense.

        Raises:
            ModelError: A data file cannot be read.
        """
        dense = self.dense()
        proto = dense.inlined(without=values)
        for tensor in proto.graph.initializer:
            if tensor.name in values:
                fill_tensor(tensor, values[tensor.name])
        for name, item in dense._hidden.items():
            if name in values:
                fill(proto, item, values[name])
        return proto

    def release(self, names: Iterable[str]) -> None:
        """Free the memory of initializers whose values somebody else has now: a training, its parameters.

        Whoever asks for them all the same gets them from the file, as long as that stays as it was. Of a model that
        was given as an object nothing is released, nor of one with sparse initializers: saving makes these dense, in a
        model made anew.
        """
        self._large.release(() if self.proto.graph.sparse_initializer else names)

    def take(self, value: npt.NDArray[np.generic]) -> npt.NDArray[np.generic] | None:
        """Release the initializer whose memory an array from :meth:`value` shows, and hand over that memory.

        What is returned is the same array, and may be written. ``None`` where others look at that memory, and where the
        array shows something else.
        """
        return None if self.proto.graph.sparse_initializer else self._large.take(value)

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators (domain "" or "ai.onnx") that the model imports."""
        opset = default_opset(self.proto.opset_import)
        assert opset is not None  # checked on loading
        return opset

    def names(self) -> list[str]:
        """The names of the main graph's initializers, in order; sparse ones are not among them."""
        return list(self._positions)

    def tensor(self, name: str) -> TensorProto:
        """An initializer as the model has it.

        Raises:
            ModelError: There is none of this name.
        """
        tensor = self.declared(name)
        if name in self._large:
            full = TensorProto(raw_data=bytes(self._large.read(name)))
            full.MergeFrom(tensor)
            return full
        return tensor

    def declared(self, name: str) -> TensorProto:
        """An initializer as the model has it, perhaps without its data.

        Raises:
            ModelError: There is none of this name.
        """
        if name in self._hidden:
            return self._hidden[name].tensor
        if name not in self._positions:
            raise ModelError(f"The model has no initializer named {name!r}; `names` lists those that it has.")
        tensor: TensorProto = self.proto.graph.initializer[self._positions[name]]
        return tensor

    def value(self, name: str) -> npt.NDArray[np.generic]:
        """An initializer's values as a read-only array; external data is memory-mapped.

        Raises:
            ModelError: There is no initializer of this name, or its external data is gone.
        """
        tensor = self.declared(name)
        if name in self._external:
            array = self._data_files.array(tensor, self._where(name))
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

    def _path_of(self, file: str) -> Path:
        """A data file, by the name that the model has for it."""
        return (self.folder or Path()) / self._moved.get(file, file)

    def training_model(self, minimum_opset: int = 18) -> ir.Model:
        """A working copy for training.

        Initializers keep their names. Large ones are not copied: they refer to the tensors of this model, or to
        its data files, which are mapped when they are read. Weights in Constant nodes and bodies are initializers, too
        (see `hidden`). Those that are listed as graph inputs too are no
        inputs any more. A ZipMap hands the tensor through that it was given. Sparse ones are dense. The domain
        "ai.onnx" is written "". Nodes stand behind what they read. Functions stay.

        Args:
            minimum_opset: The opset that the copy has at least.

        Raises:
            ModelError: An operator cannot be upgraded; the message names it.
        """
        with understood(self._label):
            # What is left with data in files is in attributes and bodies, where nobody maps it.
            proto = with_external_data(without_data(self.proto), self.folder, self._moved)
            lift(proto, list(self._hidden.values()))
            folder = "" if self.folder is None else str(self.folder)
            large = {
                tensor.name: self._working_tensor(tensor, folder)
                for tensor in self.proto.graph.initializer
                if is_large(tensor)
            }
            return working_copy(self._label, proto, large, folder, minimum_opset)

    def _working_tensor(self, tensor: TensorProto, folder: str) -> ir.TensorProtocol:
        """A large initializer of a working copy, whose data is looked up when it is read."""
        name = tensor.name
        if name in self._external:
            return DataTensor(tensor, lambda: self._where(name), lambda: self.value(name), folder)
        dtype = ir.DataType(tensor.data_type)
        if name not in self._large:
            # Behind a tensor of its own: whoever renames that must not rename the user's.
            found = ir.serde.deserialize_tensor(tensor, folder)
            if dtype == ir.DataType.STRING:
                return found
            return ir.LazyTensor(lambda: found, dtype, ir.Shape(tensor.dims), name=name)
        return ir.LazyTensor(
            lambda: ir.Tensor(self.value(name), dtype=dtype, name=name), dtype, ir.Shape(tensor.dims), name=name
        )

    def dense(self) -> ModelFile:
        """The model with its sparse initializers stored dense; itself where it has none."""
        if not self.proto.graph.sparse_initializer:
            return self
        proto = self.whole()
        for sparse in proto.graph.sparse_initializer:
            proto.graph.initializer.append(numpy_helper.from_array(dense_array(sparse), sparse.values.name))
        del proto.graph.sparse_initializer[:]
        return self.changed(proto)

    def replace_by(self, path: str | os.PathLike[str], data: bytes) -> None:
        """Write another model's bytes to a file, in the way of :meth:`save`; data files of this one stay.

        Raises:
            ModelError: The file cannot be written.
        """
        save_model(path, {}, lambda moved: [data], sources=self._data_files, keep=map(self._path_of, self._sizes))

    def check_writable(self, path: str | os.PathLike[str]) -> None:
        """Find out before training whether `save` will be able to write here.

        Raises:
            ModelError: The path, or a data file beside it, cannot be written.
        """
        check_writable(path)
        target = Path(path)
        if not self._sizes:
            return
        output = resolve_output(target)
        if output.is_node:
            refuse_node(target)
        if output.exists:
            for file in self._sizes:
                _check_folder(target, inside(target.parent, file))
            return
        for location in fresh_locations(target, self._sizes, self._original).values():
            _check_folder(target, inside(target.parent, location))

    def save(
        self,
        path: str | os.PathLike[str],
        values: Mapping[str, npt.NDArray[np.generic]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the model with new values for some initializers; every other byte is as it was.

        Data files are copied beside the new model and the values written into the copies. They keep their names where
        these are free; one that is named after the model (``model.onnx.data``) is named after the new one
        (``tuned.onnx.data``). Over an existing file they get new names (``tuned.onnx.<hex>.data``), the only other
        thing in the model that changes: the old model stays whole until a single rename puts the new one in its place.
        Then the old data files that onnxtrain wrote for this path are removed. Saving over the model itself works;
        arrays that are mapped from its old data keep their values.

        Args:
            path: The new file.
            values: New arrays by initializer name, of the initializers' types and shapes; large ones
                are taken when they are written, one after the other. With a value for a sparse initializer, all sparse
                ones are written dense.
            metadata: Entries to add to the model's metadata, which stands at the end of the file.

        Raises:
            ModelError: A value does not fit its initializer, an entry of the metadata is another one already, or the
                file cannot be written.
        """
        added = self._added_metadata(metadata or {})
        if any(sparse.values.name in values for sparse in self.proto.graph.sparse_initializer):
            self.dense().save(path, values, metadata)
            return
        new = NewValues(
            values,
            self.declared,
            positions=self._positions,
            external=self._external,
            hidden=self._hidden,
            large=self._template.large(),
        )
        check_shared(self._external, values)
        self.check_writable(path)

        def raw_data(index: int) -> bytes | memoryview:
            made = new.late(index)
            return self._raw_data(index) if made is None else made

        def render(moved: Mapping[str, str]) -> Iterator[bytes | memoryview]:
            locations = {location: moved[posixpath.normpath(location)] for location in self._locations if moved}
            initializers = list(self.proto.graph.initializer)
            yield from self._template.render(initializers, new.inline, raw_data, locations, new.inner)
            yield added

        files = {
            file: DataFile(self._path_of(file), size, new.changes.get(file, ())) for file, size in self._sizes.items()
        }
        over_itself = self._is_own(Path(path))
        keep = [] if over_itself else [item.source for item in files.values()]
        moved = save_model(path, files, render, sources=self._data_files, keep=keep, original=self._original)
        if over_itself:
            self._moved.update(moved)
            self._data_files.hold(map(self._path_of, self._sizes))

    @property
    def _original(self) -> str | None:
        """The name of the file that the model was read from."""
        return None if self._home is None else self._home.name

    def _added_metadata(self, entries: Mapping[str, str]) -> bytes:
        """The bytes of new entries, behind those of a model; none for what it has already.

        Raises:
            ModelError: It has an entry of this name with another text.
        """
        known, added = {entry.key: entry.value for entry in self.proto.metadata_props}, ModelProto()
        for key, text in entries.items():
            if known.get(key, text) != text:
                raise ModelError(
                    f"The metadata of {self._label} has another entry {key!r} already, "
                    f"{known[key][:40]!r}; save without it."
                )
            if key not in known:
                added.metadata_props.add(key=key, value=text)
        data: bytes = added.SerializeToString()
        return data

    def _is_own(self, target: Path) -> bool:
        """Return whether a path is the file that the model was read from, in the folder of its data."""
        home = self._home
        return (
            home is not None
            and home.exists()
            and target.exists()
            and os.path.samefile(home, target)
            and os.path.samefile(home.parent, target.parent)
        )

    def _raw_data(self, index: int) -> bytes:
        tensor: TensorProto = self.proto.graph.initializer[index]
        return bytes(self._large.read(tensor.name)) if tensor.name in self._large else bytes(tensor.raw_data)


def _check_folder(target: Path, data: Path) -> None:
    """Find out whether a data file below the folder of a model can be written; missing folders are made later.

    Raises:
        ModelError: It cannot.
    """
    existing = next(path for path in data.parents if os.path.lexists(path))
    if existing != target.parent:
        check_writable(existing / data.name)
