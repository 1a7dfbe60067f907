"""Federated averaging of weights that pages send, round by round, and the bounds on what one page can do."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

import numpy as np
from safetensors.numpy import save

from onnxtrain.errors import OnnxTrainError

Weights = Mapping[str, np.ndarray]


class RefusedError(OnnxTrainError):
    """Refuse the request of a page.

    Args:
        status: The status of the answer.
        reason: One sentence for the page.
    """

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Bounds:
    """Limits on the influence of one page.

    Attributes:
        pages: Pages that may join, over all rounds.
        examples: Examples that a page may claim.
        update: Norm of an update, relative to the norm of the round's weights, or to 1 where that is larger.
    """

    pages: int = 100
    examples: int = 100_000
    update: float = 10.0


class Aggregator:
    """Federated averaging: w = sum of n_k w_k / sum of n_k over the pages k of a round, with n_k examples each.

    A round ends when ``pages`` pages have sent their weights, or ``timeout`` seconds after the first did.
    ``next_round`` averages: each call is one round.

    Args:
        weights: The weights of the first round.
        pages: How many pages take part in a round.
        timeout: Seconds from the first weights of a round until late pages are left out.
        rounds: How many rounds there are.
        bounds: Limits on the influence of one page.
    """

    def __init__(self, weights: Weights, pages: int, timeout: float, rounds: int, bounds: Bounds) -> None:
        self.weights = dict(weights)
        self.rounds, self.bounds = rounds, bounds
        self.round = 0
        self.content = save(self.weights)
        self._pages, self._timeout = pages, timeout
        self._joined: set[str] = set()
        self._sending: set[str] = set()
        self._finished: set[str] = set()
        self._sent: dict[str, tuple[int, Weights]] = {}
        self._deadline = math.inf
        self._closed = False
        self._changed = threading.Condition()

    def join(self, page: str) -> tuple[int, bytes]:
        """Admit a page; returns the number of finished rounds and the weights after them as safetensors.

        Raises:
            RefusedError: The maximum number of pages has joined.
        """
        with self._changed:
            if page not in self._joined and len(self._joined) >= self.bounds.pages:
                raise RefusedError(
                    HTTPStatus.FORBIDDEN,
                    f"{self.bounds.pages} pages have joined, and no more may take part; restart the server with a "
                    f"larger --max-pages to let more in.",
                )
            self._joined.add(page)
            return self.round, self.content

    @contextmanager
    def sending(self, page: str, number: int, examples: int) -> Iterator[None]:
        """Register that a page sends its weights of a round, before they are read; each page may send once.

        Raises:
            RefusedError: The page may not send weights now, or claims too many examples.
        """
        self.join(page)
        if examples > self.bounds.examples:
            raise RefusedError(
                HTTPStatus.BAD_REQUEST,
                f"examples is {examples}; a page counts for at most {self.bounds.examples} (--max-examples).",
            )
        with self._changed:
            self._check_round(number)
            if page in self._sent or page in self._sending:
                raise RefusedError(HTTPStatus.CONFLICT, f"This page has sent its weights of round {number} already.")
            self._sending.add(page)
        try:
            yield
        finally:
            with self._changed:
                self._sending.discard(page)

    def submit(self, page: str, number: int, examples: int, weights: Weights) -> tuple[int, bytes]:
        """Add the weights of a page to a round, and wait for its end; returns the same as ``join``.

        Raises:
            RefusedError: The weights belong to another model or round, or the update is too large.
        """
        own = self.weights
        check_weights(weights, own)
        check_update(weights, own, self.bounds.update)
        with self._changed:
            self._check_round(number)
            if not self._sent:
                self._deadline = time.monotonic() + self._timeout
            self._sent[page] = examples, weights
            self._changed.notify_all()
            while self.round == number and not self._closed:
                self._changed.wait()
            if self.round == number:
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "The server has stopped.")
            return self.round, self.content

    def next_round(self) -> tuple[list[int], Weights]:
        """Wait until a round is complete, and average; returns the numbers of examples, and the weights."""
        with self._changed:
            while len(self._sent) < self._pages and (rest := self._deadline - time.monotonic()) > 0:
                self._changed.wait(None if rest == math.inf else rest)
            counts = [examples for examples, _ in self._sent.values()]
            self.weights = average([weights for _, weights in self._sent.values()], counts, self.weights)
            self.content = save(self.weights)
            self._sent = {}
            self._deadline = math.inf
            self.round += 1
            self._changed.notify_all()
            return counts, self.weights

    def finished(self, page: str) -> None:
        """Record that a page has the weights after the last round."""
        with self._changed:
            if self.round == self.rounds:
                self._finished.add(page)
                self._changed.notify_all()

    def wait_for_pages(self, seconds: float) -> None:
        """Wait until as many pages as take part in a round have the weights after the last round."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._finished) >= self._pages, seconds)

    def close(self) -> None:
        """Refuse all pages that are waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check_round(self, number: int) -> None:
        if self.round == self.rounds:
            raise RefusedError(
                HTTPStatus.CONFLICT,
                f"The training ended after {self.rounds} rounds and accepts no more weights; get the final ones.",
            )
        if number != self.round:
            raise RefusedError(
                HTTPStatus.CONFLICT,
                f"These are weights of round {number}, but it is round {self.round}; get the weights of that round.",
            )


def average(sent: list[Weights], counts: list[int], own: Weights) -> dict[str, np.ndarray]:
    """Return the mean of weights, each by its number of examples."""
    shares = [count / sum(counts) for count in counts]
    return {
        name: np.asarray(
            sum(share * weights[name].astype(np.float64) for share, weights in zip(shares, sent, strict=True))
        ).astype(array.dtype)
        for name, array in own.items()
    }


def check_weights(sent: Weights, own: Weights) -> None:
    """Refuse weights that cannot be averaged with the model's.

    Raises:
        RefusedError: A name is missing or unknown, a type or shape differs, or a value is not finite.
    """
    missing, unknown = own.keys() - sent.keys(), sent.keys() - own.keys()
    if missing or unknown:
        name, what = (min(missing), "are missing") if missing else (min(unknown), "are not trained")
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"The weights {name[:80]!r} {what}; load the page again.")
    for name, array in sent.items():
        if (array.dtype, array.shape) != (own[name].dtype, own[name].shape):
            raise RefusedError(
                HTTPStatus.BAD_REQUEST,
                f"The weights {name!r} are {array.dtype} of shape {list(array.shape)}; they need to be "
                f"{own[name].dtype} of shape {list(own[name].shape)}.",
            )
        if not np.isfinite(array).all():
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"The weights {name!r} have NaN or infinite values; the training diverged."
            )


def check_update(sent: Weights, own: Weights, most: float) -> None:
    """Refuse weights too far from the weights that the page received.

    Raises:
        RefusedError: The norm of the update is above ``most`` times the norm of the weights, or above ``most`` if that
            norm is below 1.
    """
    with np.errstate(over="ignore"):  # a norm that overflows is infinite, and above any bound
        update = norm([array.astype(np.float64) - own[name].astype(np.float64) for name, array in sent.items()])
        bound = most * max(1.0, norm([array.astype(np.float64) for array in own.values()]))
    if not update <= bound:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST,
            f"The update has the norm {update:.4g}; at most {bound:.4g} is accepted (--max-update {most:g}, relative "
            f"to the norm of the weights). Train with a smaller learning rate.",
        )


def norm(arrays: list[np.ndarray]) -> float:
    """Return the Euclidean norm over all elements."""
    return math.sqrt(sum(float((array * array).sum()) for array in arrays))
