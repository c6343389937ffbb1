"""Whatever a test does to the collector, those behind it find what was imported left out of collections."""

import gc

from tests.conftest import LeftOut


def test_what_a_test_lets_in_is_left_out_again_behind_it(monkeypatch):
    done: list[str] = []
    for name in ("unfreeze", "freeze", "collect"):
        monkeypatch.setattr(gc, name, lambda *generation, name=name: done.append(name))
    left_out = LeftOut()
    left_out.again()
    assert done == []
    gc.unfreeze()
    left_out.again()
    assert done == ["unfreeze", "collect", "freeze"]
    left_out.again()
    assert len(done) == 3
