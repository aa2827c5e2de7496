"""The ledger inside a Python process, where torch allocated before and goes on after."""

import threading

import pytest
import torch
from poise import Error, memory


def test_counts_what_the_block_makes():
    before = torch.empty(1000)
    with memory.Ledger() as ledger:
        inside = torch.empty(100)
        del before
        with ledger.account("parameters"):
            weight = torch.empty(7, dtype=torch.float64)
        snapshot = ledger.snapshot()
    outside = torch.empty(10000)
    assert snapshot.current_bytes == 456
    assert snapshot.current["other"] == 400
    assert snapshot.current["parameters"] == 56
    assert sum(snapshot.at_peak.values()) == snapshot.peak_bytes
    assert ledger.snapshot().current_bytes == 456
    del inside, weight, outside
    assert ledger.snapshot().current_bytes == 0
    assert ledger.snapshot().peak_bytes == 456


def test_budget_runs_out_and_training_goes_on():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(512, 64)

    def update():
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with memory.Ledger(budget="256KiB") as ledger:
        with pytest.raises(torch.OutOfMemoryError, match=r"\[memory\] CPU out of memory\. Tried"):
            update()
        assert ledger.snapshot().peak_bytes <= 256 * 1024
        ledger.budget = "1GiB"
        update()
        assert ledger.snapshot().peak_bytes > 512 * 256 * 4
        assert ledger.budget == 2**30


def test_out_of_memory_inside_backward():
    x = torch.ones(64, 64)
    weight = torch.ones(64, 64, requires_grad=True)
    with memory.Ledger() as ledger:
        loss = (x @ weight @ weight).sum()
        ledger.budget = ledger.snapshot().current_bytes + 64 * 64 * 4
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        ledger.budget = None
        weight.grad = None
        (x @ weight @ weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((64, 64), 2.0 * 64 * 64))


def test_other_threads_count_only_with_a_default():
    made = []

    def work():
        made.append(torch.empty(25))

    with memory.Ledger() as ledger:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert ledger.snapshot().current_bytes == 0
        ledger.make_default()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert ledger.snapshot().current_bytes == 100


def test_block_is_left_by_its_own_thread():
    ledger = memory.Ledger()
    errors = []

    def leave():
        try:
            ledger.__exit__(None, None, None)
        except Error as error:
            errors.append(str(error))

    with ledger:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "same thread" in errors[0]


def test_fork_in_a_data_loader_inside_a_block():
    data = torch.utils.data.TensorDataset(torch.arange(32.0))
    with memory.Ledger() as ledger:
        loader = torch.utils.data.DataLoader(
            data, batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        total = sum(batch[0].sum().item() for batch in loader)
    assert total == 496
    assert ledger.snapshot().current_bytes >= 0


@pytest.mark.parametrize("bad", ["20G", "", "-1GiB", "lots"])
def test_bad_budgets_name_text_and_units(bad):
    with pytest.raises(Error, match="GiB"):
        memory.Ledger(budget=bad)


def test_bytes_for_people():
    assert memory.parse_bytes("1.5GB") == 1_500_000_000
    assert memory.format_bytes(3 << 29) == "1.50 GiB"
    with pytest.raises(Error, match="unknown account: gradient; use one of parameters"):
        memory.Ledger().account("gradient")


def test_cuda_figures_or_a_clear_refusal():
    if torch.cuda.is_available():
        held = torch.empty(1000, device="cuda")
        assert memory.cuda_snapshot(0).current_bytes >= 4000
        del held
    else:
        with pytest.raises(Error, match="CUDA"):
            memory.cuda_snapshot(0)
