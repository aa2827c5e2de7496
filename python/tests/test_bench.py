"""The benchmark's own promises: equal work on both sides, and lines that say what was reached."""

from __future__ import annotations

import json

import pytest
import torch
from poise import _C, Error, bench
from poise.bench import ledger, offload, optimizer, state


def test_both_sides_do_the_same_update():
    sizes = [16, 300, 77]
    ranges, padded = optimizer._ranges(sizes, optimizer.ALIGNMENT)
    ours = optimizer._Ours(ranges, padded, low=True)
    theirs = optimizer._Torch(sizes, low=True, unscale=True)
    with torch.no_grad():
        for (begin, end), parameter in zip(ranges, theirs.parameters, strict=True):
            parameter.copy_(ours.master[begin:end])
            parameter.grad.copy_(ours.gradient[begin:end])
    for _ in range(3):
        ours.update()
        theirs.update()
    for (begin, end), parameter, low in zip(ranges, theirs.parameters, theirs.low, strict=True):
        torch.testing.assert_close(ours.master[begin:end], parameter.data, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours.low[begin:end], low, rtol=1e-2, atol=1e-2)
        assert torch.equal(ours.low[begin:end], ours.master[begin:end].bfloat16())


def test_nothing_is_written_where_a_gradient_is_not_finite():
    ours = optimizer._Ours([(0, 100)], 256, low=True)
    ours.gradient[7] = float("inf")
    before = ours.master.clone()
    ours.update()
    assert torch.equal(ours.master, before)


def test_wrong_tensors_are_refused():
    flat = torch.zeros(8)
    flats = _C.OptimizerFlats(flat, flat.double(), flat, flat)
    with pytest.raises(Error, match="float32 CPU tensors"):
        _C.stream_pass(_C.OptimizerFlats(flat, flat.double(), flat, flat, flat.bfloat16()))
    with pytest.raises(Error, match="give one"):
        _C.stream_pass(flats)


def test_lines_are_printed_and_kept(tmp_path, capsys, monkeypatch):
    def tiny():
        yield {"figure": "tiny_params_vs_torch", "value": 2.0, "aim": 3.0, "better": "higher"}

    monkeypatch.setattr(optimizer, "tiny_params", tiny)
    out = tmp_path / "deep" / "bench.jsonl"
    assert bench.main(["tiny_params", "--json", "--out", str(out)]) == 0
    line = capsys.readouterr().out.strip()
    assert json.loads(line) == json.loads(out.read_text())
    bench.main(["tiny_params", "--out", str(out)])
    assert "NOT reached" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["nothing", "--out", str(out)])


def test_the_step_is_counted_on_one_side_only():
    step = ledger._SmallStep()
    step.run()
    parameters = 4 * sum(p.numel() for p in step.model.parameters())
    assert step.counted() > parameters  # the gradients at least
    (figure,) = ledger.counting_allocator_overhead(repeats=2)
    assert figure["value"] == pytest.approx(figure["with_ms"] / figure["without_ms"], abs=2e-3)


def test_saves_of_both_sides_hold_the_same_state(tmp_path):
    figures = {f["figure"]: f for f in state.save_and_load(3_000, 1, str(tmp_path))}
    assert {"save_vs_raw", "save_vs_torch", "load_vs_torch"} <= set(figures)
    assert ("save_vs_torch_tmpfs" in figures) == ("save_vs_write_tmpfs" in figures)
    for figure in figures.values():
        assert figure["value"] > 0 and figure["better"] == "higher"
    ours, theirs = state._Ours(3_000), state._Torch(3_000)
    ours.engine.save(tmp_path / "saves")
    theirs.save(tmp_path / "state.pt")
    again = state._Torch(3_000)
    again.load(tmp_path / "state.pt")
    (block,) = again.model.blocks
    assert ours.bytes() == 12 * block.numel()  # a master and two moments, as there
    assert set(again.optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert not list(tmp_path.glob("poise-bench-*"))  # nothing is left


def test_the_stall_is_measured_without_the_writing(tmp_path):
    (figure,) = state.async_stall(3_000, 2, str(tmp_path))
    waited = max(0.0, figure["update_in_save_ms"] - figure["update_ms"])
    stall = figure["call_ms"] + waited
    assert figure["value"] == pytest.approx(stall / figure["save_ms"], rel=0.1)


def test_the_file_store_is_measured_with_the_bytes_of_the_plain_file(tmp_path, monkeypatch):
    monkeypatch.setenv("POISE_BENCH_DISK", str(tmp_path))
    store = offload._Store(str(tmp_path), 32 << 20)
    store.write()
    for begin in store.begins:
        back = torch.empty(store.TILE)
        store.span.fetch(begin, back).wait()
        assert any(torch.equal(back, tile) for tile in store.tiles)
    assert store.store.file_bytes == 32 << 20
    plain = offload._Plain(str(tmp_path), 32 << 20, direct=False)
    plain.write()
    content = (tmp_path / "plain").read_bytes()
    assert len(content) == 32 << 20 and len({content[: 1 << 20]}) == 1
    assert content[1 << 20 : 2 << 20] == plain.memory[1][:]
    plain.close()
    (tmp_path / "plain").unlink()
    figures = {f["figure"]: f for f in offload.file_store(16 << 20, repeats=1)}
    buffered = figures["file_store_vs_buffered"]
    ratios = [
        buffered[f"ours_{way}_mb_per_s"] / buffered[f"buffered_{way}_mb_per_s"]
        for way in ("write", "read")
    ]
    assert buffered["value"] == pytest.approx(min(ratios), rel=0.02)
    (overlap,) = offload.file_overlap(repeats=1)
    parts = [overlap[f"{name}_ms"] for name in ("write", "read", "update")]
    assert min(parts) > 1  # that much no machine does in a millisecond
    assert overlap["value"] == pytest.approx(overlap["whole_ms"] / max(parts), rel=0.02)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Error, match="20000000 elements are too few; give 20971520 or more"):
        next(offload.file_overlap(20_000_000))


@pytest.mark.parametrize("way", ["apart", "folded"])
def test_the_offloaded_update_is_torchs(way):
    updates = offload._Updates(10 * 700, {"optimizer": "host"})
    before = [p.detach().float() for p in updates.model]
    theirs = optimizer._Torch([700] * offload.LAYERS, low=True, unscale=False)
    with torch.no_grad():
        for parameter, value in zip(theirs.parameters, before, strict=True):
            parameter.copy_(value)
            parameter.grad.copy_(updates.gradient.float())
    for group in theirs.optimizer.param_groups:
        group |= {"betas": (0.9, 0.999), "weight_decay": 0.0}  # poise decays matrices only
    for _ in range(2):
        getattr(updates, way)()  # one gradient, or the mean of equal ones
        theirs.update()
    for number, parameter in enumerate(theirs.parameters):
        master = updates.engine.master(str(number))
        torch.testing.assert_close(master, parameter.detach(), rtol=1e-5, atol=1e-6)
