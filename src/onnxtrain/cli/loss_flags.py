"""Flags for arguments of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from onnxtrain.cli.flags import LOSS
from onnxtrain.errors import OptionError


@Parameter(name="*", group=LOSS)
@dataclass(frozen=True)
class LossFlags:
    """Flags for arguments of the loss."""

    axis: Annotated[
        int | None,
        Parameter(help="Class axis of the logits, for softmax_cross_entropy.  [default: by the labels' shape]"),
    ] = None
    ignore_index: Annotated[
        int | None, Parameter(help="Label that the loss ignores, for softmax_cross_entropy.  [default: -100]")
    ] = None
    class_weights: Annotated[
        str | None,
        Parameter(metavar="NUMBERS", help="One weight per class, for softmax_cross_entropy: 1,1,3."),
    ] = None
    label_smoothing: Annotated[
        float | None, Parameter(help="Share of every label to spread over all classes, in [0, 1).  [default: 0]")
    ] = None
    chunk: Annotated[
        int | None,
        Parameter(
            metavar="ROWS",
            help="Rows (tokens) of logits to compute at a time, for softmax_cross_entropy, next_token, dpo, orpo and "
            "kto: saves memory with large vocabularies.  [default: all]",
        ),
    ] = None
    check_targets: Annotated[
        bool, Parameter(help="Refuse targets outside 0 to 1, and distributions that do not sum to 1.")
    ] = True

    def of(self, loss: str) -> Any:
        """Return the loss with these arguments.

        Raises:
            OptionError: The loss has no such argument.
        """
        given: dict[str, Any] = {"axis": self.axis, "ignore_index": self.ignore_index}
        given["class_weights"] = None if self.class_weights is None else _numbers(self.class_weights)
        given["label_smoothing"], given["chunk"] = self.label_smoothing, self.chunk
        given["check_targets"] = None if self.check_targets else False
        options = {name: value for name, value in given.items() if value is not None}
        if not options:
            return loss
        from onnxtrain.losses.loss_choice import resolve_loss

        return resolve_loss(loss, **options)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--class-weights is {text!r}; it needs numbers with commas between them: 1,1,3.") from None
