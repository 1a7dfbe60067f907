from __future__ import annotations

import gc

import pytest

from onnxtrain.gc_pause import gc_paused


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
