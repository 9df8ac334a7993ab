"""Accumulators with ``exact=True`` warn of sums that do not fit into their words."""

import warnings

import numpy as np
import pytest
from accumulator.kinds import Dense, Sparse
from accumulator.test_exact import (
    add,
    add_all,
    grad_of,
    kind,
    make,
    mesh,
    on_each,
    opened,
    row,
    taken,
)

import gradreduce as gr

__all__ = ["kind", "mesh"]

TOO_MANY = (1.0, 2.0**-30, 2.0**-60)  # for two words
FIT = (1.0, 2.0**-30, 2.0**-10)
SUM = 1 + 2.0**-10


@pytest.mark.parametrize("over_mesh", [False, True])
def test_the_warning_names_the_sum_that_did_not_fit_and_the_line_of_the_caller(kind, over_mesh):
    """Of terms of several gradients, or of a row of one; also after the memory has grown."""
    with opened() as mesh:
        home = mesh if over_mesh else mesh.devices[0]
        accs = [make(kind, name=name, device=home, words=2) for name in "abcd"]
        for terms in zip(FIT, TOO_MANY, FIT, TOO_MANY, strict=True):  # one block has all flags
            assert gr.apply_grads(accs, [grad_of(kind, row(term)) for term in terms])
        if kind is Sparse:
            accs.append(make(kind, name="e", device=home, words=2))
            add(accs[-1], ([1] * 3, np.float32(TOO_MANY)[:, None]))
            for _ in range(2):
                add(accs[-1], ([8, 9], np.ones((2, 1), np.float32)))
        with pytest.warns(gr.InexactSumWarning) as caught:
            gr.take_grads(accs, 3)
        assert [str(each.message) for each in caught] == [
            f"the exact sum of '{name}' did not fit into its words, or overflowed on the way: its "
            "bits may depend on the order of the terms. Pass a larger words= (sums of float64 in "
            "one call always have 8)"
            for name in ("bde" if kind is Sparse else "bd")
        ]
        assert {each.filename for each in caught} == {__file__}
        for acc in accs:  # the flag belongs to one sum
            add_all(acc, FIT)
            taken(acc, 3)


def test_one_warning_for_all_devices_of_a_mesh_and_none_for_a_sum_that_was_dropped():
    with opened() as mesh:
        acc = make(Dense, device=mesh, words=2, name="of all")
        for term in TOO_MANY:
            acc.apply_grad(gr.PerReplica([np.float32([term])] * 3, mesh))
        acc.load_state_dict(make(Dense, device=mesh, words=2).state_dict())
        assert acc.num_accumulated() == 0
        for term in TOO_MANY:
            acc.apply_grad(gr.PerReplica([np.float32([term])] * 3, mesh))
        with pytest.warns(gr.InexactSumWarning) as caught:
            acc.take_grad(9)
        assert len(caught) == 1
        mesh.synchronize()


def test_words_of_several_devices_are_added_without_a_limit(kind):
    with opened((0, 1)) as mesh:
        acc = make(kind, device=mesh, words=2)
        for rest in ((2.0**-90,), ()):  # with it device 1 has three words
            for device, terms in enumerate(((1.0, 2.0**-30), (2.0**-60, *rest, -1.0))):
                for term in terms:
                    add(acc, row(term), replica=device)
            if rest:
                with pytest.warns(gr.InexactSumWarning):
                    taken(acc, 5)
        assert taken(acc, 4)[1].tolist() == [[2.0**-30]]
        acc = make(kind, "float64", device=mesh, words=8)  # nine do not fit into eight
        terms = [2.0 ** (-100 * number) for number in range(9)]
        for device, of_device in enumerate((terms[::2], terms[1::2])):
            for term in of_device:
                add(acc, row(term, "float64"), replica=device)
        with pytest.warns(gr.InexactSumWarning):
            assert taken(acc, 9)[1].tolist() == [[1.0]]


@pytest.mark.parametrize("wait", ["take", "numpy", "synchronize", "state_dict"])
def test_no_call_waits_for_a_flag_and_the_first_that_finds_it_warns(wait):
    """Work runs as late as the host allows."""
    with opened((0, 0), strict=False, schedule_seed=0) as mesh:
        device, other = mesh.devices
        acc, beside = [make(Dense, name=name, device=each, words=2)
                       for name, each in (("late", device), ("beside", other))]  # fmt: skip
        with mesh.journal() as journal:
            for term in TOO_MANY:
                acc.apply_grad(device.upload(np.float32([term])))
            result = acc.take_grad(3, output_type="buffer")
            beside.apply_grad(device.upload(np.float32([1])))
            beside.take_grad(1, output_type="buffer")
        assert journal.syncs == 0
        beside.apply_grad(np.float32([1]), 1)
        calls = {
            "take": lambda: beside.take_grad(1),
            "numpy": result.numpy,
            "synchronize": mesh.synchronize,
            "state_dict": beside.state_dict,
        }
        with pytest.warns(gr.InexactSumWarning, match="'late'") as caught:
            calls[wait]()
        assert caught[0].filename == __file__
        mesh.synchronize()  # once


def test_a_checkpoint_warns_too(mesh):
    for acc, fresh in zip(on_each(mesh, words=2), on_each(mesh, words=2), strict=True):
        add_all(acc, TOO_MANY)
        with pytest.warns(gr.InexactSumWarning):
            state = acc.state_dict()
        fresh.load_state_dict(state)
        taken(fresh, 3)


def test_a_warning_that_raises_leaves_accumulators_usable(mesh):
    with warnings.catch_warnings(action="error"):
        for acc in on_each(mesh, words=2):
            add_all(acc, TOO_MANY)
            with pytest.raises(gr.InexactSumWarning):
                acc.take_grad(3)
            assert (acc.num_accumulated(), acc.global_step) == (0, 1)
            add_all(acc, FIT)
            assert taken(acc, 3)[1].tolist() == [[SUM]]


def test_a_handler_of_warnings_may_use_accumulators(monkeypatch, mesh):
    """No lock is held."""
    seen = []
    for acc in on_each(mesh, words=2):
        add_all(acc, TOO_MANY)

        def use(*_, acc=acc, **__):
            assert acc.apply_grad(np.float32([1]), 1)
            seen.append(acc.accumulator_ref.lock._is_owned())

        with warnings.catch_warnings(action="always"):
            monkeypatch.setattr(warnings, "showwarning", use)
            acc.take_grad(3)
    assert seen == [False, False]


def test_a_reset_drops_flags_of_sums_that_were_dropped():
    with opened((0,), strict=False, schedule_seed=0) as mesh:
        acc = make(Dense, device=mesh, words=2)
        add_all(acc, TOO_MANY)
        acc.take_grad(3, output_type="buffer")
        mesh.mesh_state.fail("planted")
        mesh.reset(timeout=30)
        mesh.synchronize()
        assert not mesh.mesh_state.inexact.copies
        add_all(acc, FIT)
        assert taken(acc, 3)[1].tolist() == [[SUM]]
