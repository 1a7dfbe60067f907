"""A server with FastAPI: it answers from many threads while one thread learns from feedback and saves the model.

Behind a real server: ``pip install fastapi uvicorn``, then ``uvicorn --factory server:app --app-dir examples``. Run as
a program, it sends itself requests from many threads.
"""

import contextlib
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import onnxtrain

DATA = Path(__file__).resolve().parent / "data"


class Service:
    """A model that answers, and learns from feedback.

    Args:
        trainer: Any thread may predict with it; only the thread of this class trains it.
        path: The file that the model is saved to.
        save_every: Updates between two saves.
        waiting: Messages of feedback that may wait; more are refused.
    """

    def __init__(self, trainer: onnxtrain.Trainer, path: Path, *, save_every: int = 20, waiting: int = 100) -> None:
        self.trainer, self.path, self.save_every = trainer, path, save_every
        self.updates = self.saves = 0
        self.error: Exception | None = None
        self._feedback: queue.Queue = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._learn, daemon=True)
        self._thread.start()

    def predict(self, rows: list[list[float]]) -> list[list[float]]:
        """Return the probabilities of rows, by the weights of one update."""
        return self.trainer.predict_proba(np.asarray(rows, np.float32)).tolist()

    def tell(self, rows: list[list[float]], labels: list[int]) -> bool:
        """Let the model learn rows soon; return False if too much waits already."""
        try:
            self._feedback.put_nowait((rows, labels))
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Learn what waits, save, and end the thread."""
        self._feedback.put(None)
        self._thread.join()

    def _learn(self) -> None:
        while (told := self._feedback.get()) is not None:
            self._tried(self._update, *told)
        self._tried(self._save)

    def _tried(self, function, *arguments) -> None:
        try:
            function(*arguments)
        except (onnxtrain.errors.OnnxTrainError, OSError) as error:
            self.error = error  # a row that does not fit, or a full disk: the next one may

    def _update(self, rows: list[list[float]], labels: list[int]) -> None:
        self.trainer.train_step(np.asarray(rows, np.float32), np.asarray(labels))
        self.updates += 1
        if self.updates % self.save_every == 0:
            self._save()

    def _save(self) -> None:
        self.trainer.save(self.path)  # the file has its name once it is complete
        self.saves += 1


def new_service(folder: Path) -> Service:
    """Return a service with a new network for irises, whose model is saved into the folder."""
    model = onnxtrain.examples.mlp((4, 16, 3))
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.01)", threads=1)
    return Service(trainer, folder / "served.onnx")


def app(service: Service | None = None):
    """Return the application; it closes the service when the server stops."""
    import fastapi
    import pydantic

    service = service or new_service(Path.cwd())

    class Rows(pydantic.BaseModel):
        rows: list[pydantic.conlist(float, min_length=4, max_length=4)]

    class Feedback(Rows):
        labels: list[pydantic.conint(ge=0, le=2)]

    @contextlib.asynccontextmanager
    async def lifespan(_):
        yield
        service.close()

    found = fastapi.FastAPI(lifespan=lifespan)

    # FastAPI runs functions without "async" in threads, of which there are 40.
    @found.post("/predict")
    def predict(given: Rows):
        return {"probabilities": service.predict(given.rows)}

    @found.post("/feedback", status_code=202)
    def feedback(given: Feedback):
        if len(given.rows) != len(given.labels):
            raise fastapi.HTTPException(422, f"There are {len(given.rows)} rows and {len(given.labels)} labels.")
        if not service.tell(given.rows, given.labels):
            raise fastapi.HTTPException(503, "Too much feedback waits; send it again later.")

    @found.get("/status")
    def status():
        return {"updates": service.updates, "saves": service.saves, "error": str(service.error or "")}

    return found


@contextlib.contextmanager
def requests_of(service: Service):
    """Yield functions that ask and tell the service, over FastAPI where it is installed; close it at the end."""
    try:
        from fastapi.testclient import TestClient
    except (ImportError, RuntimeError):  # without FastAPI, or without its test client's package
        yield service.predict, service.tell
        service.close()
        return
    with TestClient(app(service)) as client:

        def ask(rows):
            answer = client.post("/predict", json={"rows": rows})
            answer.raise_for_status()
            return answer.json()["probabilities"]

        def tell(rows, labels):
            return client.post("/feedback", json={"rows": rows, "labels": labels}).status_code == 202

        yield ask, tell


def main(folder: Path, *, threads: int = 8, requests: int = 40) -> dict[str, float]:
    """Ask from many threads while one learns; return accuracies, and the numbers of answers, updates and saves."""
    table = np.genfromtxt(DATA / "flowers.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    _, labels = np.unique(table["species"], return_inverse=True)
    x = np.array([[row[column] for column in range(4)] for row in table])
    service = new_service(folder)

    def right(ask) -> float:
        return float((np.argmax(ask(x.tolist()), 1) == labels).mean())

    with requests_of(service) as (ask, tell):
        before = right(ask)

        def user(seed: int) -> int:
            random, answers = np.random.default_rng(seed), 0
            for _ in range(requests):
                chosen = random.integers(0, len(x), 8)
                found = np.array(ask(x[chosen].tolist()))
                assert found.shape == (8, 3)
                assert np.allclose(found.sum(1), 1, atol=1e-5)
                answers += len(found)
                while not tell(x[chosen].tolist(), labels[chosen].tolist()):
                    time.sleep(0.01)  # status 503
            return answers

        with ThreadPoolExecutor(threads) as pool:
            answers = sum(pool.map(user, range(threads)))
    if service.error:
        raise service.error
    return {
        "before": before,
        "after": right(service.predict),
        "answers": answers,
        "updates": service.updates,
        "saves": service.saves,
    }


if __name__ == "__main__":
    print(main(Path.cwd()))
