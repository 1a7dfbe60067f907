from __future__ import annotations

import gc
import warnings

import pytest

from onnxtrain.errors._internal import gc_paused, ignored_warnings


@pytest.fixture(autouse=True)
def _enabled_again():
    yield
    gc.enable()


def test_no_collection_inside_and_collections_after_an_error():
    def fail():
        with gc_paused():
            with gc_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert gc.isenabled()


def test_a_disabled_collector_stays_disabled():
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_pauses_of_threads_may_overlap():
    first, second = gc_paused(), gc_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_ignored_warnings_of_threads_may_overlap():
    before = list(warnings.filters)
    first, second = ignored_warnings(UserWarning), ignored_warnings(DeprecationWarning, "PIL")
    first.__enter__()
    second.__enter__()
    warnings.warn("quiet", UserWarning, stacklevel=1)
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert list(warnings.filters) == before
