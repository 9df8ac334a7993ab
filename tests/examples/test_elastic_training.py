"""The elastic example continues from its checkpoint, and never leaves half of one."""

from pathlib import Path
from typing import Any

import elastic_training
import numpy as np
import pytest

pytestmark = pytest.mark.repo


def trained(path: Path, steps: int, replicas: int = 3) -> dict[str, Any]:
    flags = ["--checkpoint", str(path), "--steps", str(steps), "--replicas", str(replicas)]
    picture = path.with_suffix(".png")
    assert elastic_training.main([*flags, "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    return elastic_training.load(path)


def test_a_training_that_is_continued_ends_like_one_that_is_not(tmp_path, capsys):
    trained(tmp_path / "in_two.ckpt", 3)
    in_two = trained(tmp_path / "in_two.ckpt", 5)
    assert "3 replicas in 1 process(es), from step 3\n" in capsys.readouterr().out
    np.testing.assert_equal(in_two, trained(tmp_path / "at_once.ckpt", 5))


def test_a_process_that_ends_while_it_saves_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "w.ckpt"
    elastic_training.save(path, {"step": 1})

    def end(stored: Any, **arrays: Any) -> None:
        stored.write(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "savez", end)
        elastic_training.save(path, {"step": 2})
    assert elastic_training.load(path) == {"step": 1}
    elastic_training.save(path, {"step": 3})
    assert elastic_training.load(path) == {"step": 3}
