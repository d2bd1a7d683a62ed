"""The demo's parts; `nox -s demo` runs all of it."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_scan import _demo
from remat_scan._cli import main
from remat_scan._demo_model import Decoder, loss_in_bits


def test_text_is_real_and_the_held_out_part_is_another():
    training, validation = _demo.real_text()
    assert "import " in training
    assert len(training) > 10 * len(validation) > 10_000
    assert validation[:2000] not in training


def test_batches_are_windows_of_the_text():
    text = np.arange(100_000) % 251
    for batch in itertools.islice(_demo.batches(text, np.random.default_rng(0), 4), 3):
        assert batch.shape == (4, _demo.TRAINED.length + 1)
        assert ((np.diff(batch) == 1) | (np.diff(batch) == -250)).all()


def test_layers_are_unlike():
    sizes = _demo.TRAINED.layers
    assert {s.window for s in sizes} == {64, None}
    assert {s.kv for s in sizes} >= {"donated", "shared"}
    assert len({s.hidden for s in sizes}) == 2


def test_an_untrained_model_knows_nothing():
    model = Decoder(_demo.TRAINED, key=jax.random.key(0))
    text = jax.random.randint(jax.random.key(1), (1, 65), 0, 256)
    assert 7.5 < float(loss_in_bits(model, text, lambda layer: layer)) < 10


def test_the_future_is_not_seen():
    model = Decoder(_demo.TRAINED, key=jax.random.key(0))
    text = jnp.arange(64)[None]
    changed = text.at[0, 40].set(200)
    a, b = (model(t, _demo.WAYS["loop"]) for t in (text, changed))
    np.testing.assert_array_equal(a[:, :40], b[:, :40])
    assert (a[:, 40:] != b[:, 40:]).any()


def test_command(tmp_path, capsys):
    out = tmp_path / "demo.json"
    arguments = ["demo", "--no-train", "--target", "cpu", "--json", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    memory = json.loads(out.read_text())["memory"]["cpu"]
    assert set(memory) == {"none", "jax.checkpoint", "loop", "barrier", "both"}
    assert memory["loop"]["temporaries"] < 0.5 * memory["none"]["temporaries"]
    assert "of jax.checkpoint" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--steps", "0"], "positive number"), (["--target", "h10"], "h100")],
)
def test_bad_input(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["demo", *arguments])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err
