"""Exceptions of onnxtrain: few classes; a message is one sentence that names the cause and the next step."""

# Imports nothing, also no __future__: Ctrl-C is not caught yet while this module is imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self


class OnnxTrainError(Exception):
    """Base of all onnxtrain errors; the command line prints the message and exits with 2.

    The fields say for programs what the sentence says for people. A field is None where a sentence has no such part.

    Attributes:
        what: The subject: the name of an array, a tensor, a node, a file or an option.
        got: What it has: a value, a shape, a type, a count.
        wanted: What it needs instead.
        everywhere: True if all ranks of a distributed training raise it, so that one of them prints it.
    """

    what: object = None
    got: object = None
    wanted: object = None
    everywhere: bool = False

    def about(self, what: object = None, *, got: object = None, wanted: object = None) -> "Self":
        """Set the fields and return the error: ``raise DataError(sentence).about(name, got=shape)``."""
        self.what, self.got, self.wanted = what, got, wanted
        return self

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and notebooks print: the message, and the line of the user's code that raised it."""
        import linecache  # only a notebook asks
        import traceback

        package, line = __name__.partition(".")[0], ""
        for frame, number in traceback.walk_tb(self.__traceback__):
            if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
                break
            line = f"    line {number}: {linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()}"
        return [f"{type(self).__name__}: {self}", *([line] if line else [])]


class ModelError(OnnxTrainError):
    """A model file cannot be read, is not valid, or cannot be written."""


class DataError(OnnxTrainError):
    """Training or validation data does not fit the model: names, shapes, types, ranges, NaN, emptiness."""


class OptionError(OnnxTrainError, ValueError):
    """An argument has a value that it cannot have: an unknown loss, a pattern that matches nothing."""


class ArgumentError(OptionError, TypeError):
    """A function was called with an argument that it does not have; the message names the nearest right one."""


class OperatorError(OnnxTrainError, ValueError):
    """An operator got inputs or attributes that its specification does not allow."""


class GradientError(OnnxTrainError):
    """A gradient cannot be built: operators without a rule, names that do not exist, unusable shapes."""


class TrainingInfoError(OnnxTrainError):
    """A ``TrainingInfoProto`` is not valid: a binding, an initialization or an algorithm graph."""


class CheckpointError(OnnxTrainError):
    """A checkpoint cannot be read, or does not belong to this model and these settings."""


class NumericalError(OnnxTrainError):
    """Numerical failure: the loss or a weight became NaN or infinite."""

    everywhere = True


class StepError(OnnxTrainError):
    """ONNX Runtime failed inside a step; the message names the node and the rule that wrote it."""


class BusyError(OnnxTrainError):
    """A call would change a trainer that another thread trains at this moment; nothing is changed."""


class TrainingHint(OnnxTrainError, UserWarning):  # noqa: N818 - it is a warning
    """Warning that training may do something else than the caller expects; an error with ``python -W error``."""


class ParallelError(OnnxTrainError):
    """Failure of distributed training: a process ended, hangs, or has another model or other settings.

    Attributes:
        lost: True if a process is lost; a new start resumes from the last checkpoint.
    """

    def __init__(self, sentence: str, *, lost: bool = False) -> None:
        super().__init__(sentence)
        self.lost = lost

    everywhere = True
