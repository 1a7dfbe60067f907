"""What all tests share. ``tests`` is on the import path: ``from zoo import ...`` works in every folder."""

import os

# Tests run in parallel processes; a thread pool in each would only get in the others' way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

collect_ignore_glob = ["*conftest.py"]  # loaded already; the doctest collector would import them by the same name
