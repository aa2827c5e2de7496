"""Order, resuming, windows, workers and reading ahead, against plain Python and plain DataLoaders."""

import copy
import gc
import logging
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict, UserDict, defaultdict

import poise
import pytest
import torch
from poise import _C
from poise.data import (
    ResumableSampler,
    WindowIterator,
    byte_corpus,
    cast_inputs,
    count_targets,
)
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

MASK = (1 << 64) - 1


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference_permutation(n, seed, epoch):
    """The swap-or-not network in exact integers, written from the paper and not from the C++."""
    step = 0x9E3779B97F4A7C15
    state = mix((mix((seed + step) & MASK) + epoch) & MASK)
    rounds = []
    for _ in range(24 + 4 * (n - 1).bit_length() if n > 1 else 0):
        offset = (mix((state + step) & MASK) * n) >> 64
        state = (state + 2 * step) & MASK
        rounds.append((offset, mix(state)))

    def at(x):
        for offset, key in rounds:
            partner = (offset - x) % n
            if mix(max(x, partner) ^ key) & 1:
                x = partner
        return x

    return at


@pytest.mark.parametrize("n", [1, 2, 3, 10, 100, 1000003, (1 << 62) - 57, 1 << 62])
@pytest.mark.parametrize("seed, epoch", [(0, 0), (42, 1), (MASK, 9)])
def test_permutation_is_the_reference(n, seed, epoch):
    mine, expected = (
        _C.Permutation(n, seed, epoch),
        reference_permutation(n, seed, epoch),
    )
    for position in sorted({0, 1 % n, n // 3, n - 1}):
        assert mine(position) == expected(position)


def test_sampler_walks_epochs_and_resumes_anywhere():
    sampler = ResumableSampler(23, seed=7)
    epochs = [list(sampler), list(sampler)]
    assert [sorted(e) for e in epochs] == [list(range(23))] * 2
    assert epochs[0] == [reference_permutation(23, 7, 0)(i) for i in range(23)]
    assert epochs[1] == [reference_permutation(23, 7, 1)(i) for i in range(23)]
    for cursor in range(23):
        resumed = ResumableSampler(23, seed=7)
        resumed.load_state_dict({"cursor": 23 + cursor, "size": 23, "seed": 7, "shuffle": True})
        assert list(resumed) == epochs[1][cursor:]
    assert list(ResumableSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]
    with pytest.raises(poise.Error, match="size was 23, is 24"):
        ResumableSampler(24, seed=7).load_state_dict(sampler.state_dict())


class Recording(Dataset):
    """Sample i is i; remembers what was asked for."""

    def __init__(self, n):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(i)
        return torch.tensor(i)


def lists(windows):
    return [[batch.tolist() for batch in window] for window in windows]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_windows_hold_every_sample_and_the_last_is_short(prefetch):
    windows = lists(WindowIterator(Recording(11), 2, 4, seed=3, epochs=2, prefetch=prefetch))
    assert [[len(b) for b in w] for w in windows] == [[2, 2, 2, 2], [2, 1]] * 2
    for epoch, part in enumerate([windows[:2], windows[2:]]):
        order = reference_permutation(11, 3, epoch)
        assert [i for w in part for b in w for i in b] == [order(i) for i in range(11)]


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_updates_per_epoch_are_the_ceiling(length, accumulation):
    windows = lists(WindowIterator(Recording(length), 1, accumulation, shuffle=False))
    assert len(windows) == -(-length // accumulation)
    assert [i for w in windows for b in w for i in b] == list(range(length))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_resume_at_every_window_reads_nothing_skipped(prefetch):
    unbroken, states, windows = (
        WindowIterator(Recording(11), 2, 2, epochs=2, prefetch=prefetch),
        [],
        [],
    )
    for window in unbroken:
        windows.append([b.tolist() for b in window])
        states.append(copy.deepcopy(unbroken.state_dict()))
    assert len(windows) == 6
    for done, state in enumerate(states, start=1):
        data = Recording(11)
        resumed = WindowIterator(data, 2, 2, epochs=2, prefetch=prefetch)
        resumed.load_state_dict(state)
        assert lists(resumed) == windows[done:]
        assert len(data.read) == sum(len(b) for w in windows[done:] for b in w)


def test_cursor_counts_samples_handed_out_and_seek_goes_back():
    windows = WindowIterator(Recording(100), 2, 3, prefetch=4)
    first = lists([next(windows), next(windows)])
    assert windows.cursor == 12
    windows.seek(0)
    assert lists([next(windows), next(windows)]) == first
    with pytest.raises(poise.Error, match="0 or more"):
        windows.seek(-1)


def test_same_data_as_the_cpp_loader(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 3)
    corpus = byte_corpus(tmp_path, 16, suffix=".txt")
    python = WindowIterator(corpus, 3, 4, seed=9, epochs=2)
    cpp = corpus.windows(3, 4, seed=9, epochs=2)
    for ours, theirs in zip(python, cpp, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=False):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        assert python.cursor == cpp.cursor


def test_ranks_share_each_window():
    whole = lists(WindowIterator(Recording(22), 2, 4, epochs=1))
    parts = [lists(WindowIterator(Recording(22), 2, 2, ranks=2, rank=r)) for r in (0, 1)]
    for i, window in enumerate(whole):
        flat = [sample for batch in parts[0][i] + parts[1][i] for sample in batch]
        assert flat == [sample for batch in window for sample in batch]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_while_threads_of_poise_run(context, tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(200)))
    corpus = byte_corpus(tmp_path / "a", 9)
    cpp = corpus.windows(2, 3, epochs=1, prefetch=4)
    expected = [next(cpp)]  # its reading thread is alive from here on
    windows = WindowIterator(
        corpus, 2, 3, num_workers=2, multiprocessing_context=context, timeout=100
    )
    got = list(windows)
    expected += list(cpp)
    assert len(got) == len(expected) == 4
    for ours, theirs in zip(got, expected, strict=False):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_existing_loaders_keep_batch_size_collate_and_drop_last():
    data = TensorDataset(torch.arange(11))
    loader = DataLoader(data, batch_size=2, collate_fn=lambda rows: len(rows), drop_last=True)
    assert list(WindowIterator(loader, accumulation=3)) == [[2, 2, 2], [2, 2]]
    shuffled = DataLoader(Recording(11), batch_size=2, shuffle=True)
    assert lists(WindowIterator(shuffled, accumulation=2, seed=5)) == lists(
        WindowIterator(Recording(11), 2, 2, seed=5)
    )
    assert lists(WindowIterator(DataLoader(Recording(4), batch_size=2))) == [
        [[0, 1]],
        [[2, 3]],
    ]


def test_a_sampler_of_its_own_keeps_its_order_and_skips_indices_only():
    data = Recording(8)
    loader = DataLoader(data, batch_size=2, sampler=[7, 6, 5, 4, 3, 2, 1, 0])
    windows = WindowIterator(loader, accumulation=2)
    assert lists([next(windows)]) == [[[7, 6], [5, 4]]]
    data.read.clear()
    resumed = WindowIterator(loader, accumulation=2)
    resumed.load_state_dict(windows.state_dict())
    assert lists(resumed) == [[[3, 2], [1, 0]]]
    assert data.read == [3, 2, 1, 0]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10))


def test_iterable_data_resumes_by_skipping_and_says_so_once(caplog):
    first = WindowIterator(Stream(), 2, 2)
    assert lists([next(first)]) == [[[0, 1], [2, 3]]]
    resumed = WindowIterator(Stream(), 2, 2)
    with caplog.at_level(logging.WARNING, logger="poise"):
        resumed.load_state_dict(first.state_dict())
        assert lists([next(resumed)]) == [[[4, 5], [6, 7]]]
        resumed.load_state_dict(first.state_dict())
        assert lists(resumed) == [[[4, 5], [6, 7]], [[8, 9]]]
    assert len([r for r in caplog.records if "dropping 2 batches" in r.getMessage()]) == 1
    assert [len(w) for w in WindowIterator((b for b in range(5)), accumulation=2)] == [
        2,
        2,
        1,
    ]


class Drawing(Recording):
    def __getitem__(self, index):
        return torch.randint(0, 1 << 30, ())


class DrawingStream(IterableDataset):
    def __iter__(self):
        return (Drawing(4)[index] for index in range(4))


@pytest.mark.parametrize(
    "data",
    [
        lambda: DataLoader(Drawing(4), sampler=[3, 2, 1, 0], num_workers=1),
        lambda: DataLoader(DrawingStream(), num_workers=1),
        lambda: DataLoader(Drawing(4), num_workers=1),
    ],
)
def test_workers_draw_anew_in_each_epoch_and_the_same_when_it_is_resumed(data):
    windows = WindowIterator(data(), epochs=3, prefetch=0)
    drawn = lists([next(windows) for _ in range(5)])
    resumed = WindowIterator(data(), epochs=3, prefetch=0)
    resumed.load_state_dict({**windows.state_dict(), "offset": 0})
    assert drawn[0] != drawn[4]
    torch.rand(3)
    assert lists([next(resumed)]) == drawn[4:]


def test_the_global_generator_is_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    list(WindowIterator(Recording(6), 2, 2, epochs=2))
    list(WindowIterator(Stream(), 2, 2, epochs=2))
    list(WindowIterator(DataLoader(Recording(6), sampler=SubsetRandomSampler(range(6))), epochs=2))
    assert torch.equal(torch.rand(3), expected)


class Broken(Recording):
    def __getitem__(self, i):
        if i >= 4:
            raise KeyError("sample 4 is broken")
        return super().__getitem__(i)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_keep_their_type_and_leave_no_thread(prefetch):
    before = set(threading.enumerate())  # threads of other tests may end meanwhile
    windows = WindowIterator(Broken(8), 2, 1, shuffle=False, prefetch=prefetch)
    assert lists([next(windows), next(windows)]) == [[[0, 1]], [[2, 3]]]
    for _ in range(2):
        with pytest.raises(KeyError, match="sample 4 is broken"):
            next(windows)
        assert windows.cursor == 4
    dropped = WindowIterator(Recording(1000), 1, 1, prefetch=2)
    next(dropped)
    (thread,) = set(threading.enumerate()) - before
    del dropped
    gc.collect()
    thread.join(5)
    assert not thread.is_alive() and not set(threading.enumerate()) - before


def counted_batches(log):
    for i in range(6):
        if i == 3:
            raise KeyError("batch 3 is broken")
        log.append(i)
        yield torch.tensor([i])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_generator_that_failed_does_not_look_like_one_that_ended(prefetch):
    windows = WindowIterator(counted_batches([]), prefetch=prefetch)
    assert lists([next(windows) for _ in range(3)]) == [[[0]], [[1]], [[2]]]
    with pytest.raises(KeyError, match="batch 3 is broken"):
        next(windows)
    for _ in range(2):
        with pytest.raises(poise.Error, match="a generator cannot be read a second time"):
            next(windows)
    assert windows.cursor == 3


def test_a_generator_is_not_started_again_without_what_was_read_ahead():
    log = []
    windows = WindowIterator(counted_batches(log), prefetch=2)
    assert lists([next(windows)]) == [[[0]]]
    windows.close()
    assert log[0] == 0
    with pytest.raises(poise.Error, match="cannot be read a second time"):
        next(windows)
    two_epochs = WindowIterator((torch.tensor([i]) for i in range(2)), epochs=2)
    with pytest.raises(poise.Error, match="cannot be read a second time"):
        list(two_epochs)


class Restarting:
    """Returns itself from iter(), from the beginning."""

    def __iter__(self):
        self.i = 0
        return self

    def __next__(self):
        self.i += 1
        if self.i > 2:
            raise StopIteration
        return torch.tensor([self.i])


def test_an_iterator_that_starts_anew_may():
    assert lists(WindowIterator(Restarting(), epochs=2)) == [[[1]], [[2]], [[1]], [[2]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_interpreter_exits_while_reading_ahead(workers):
    script = (
        "import poise.data, torch\n"
        "w = poise.data.WindowIterator(torch.utils.data.TensorDataset(torch.arange(1000)), 1, 2,"
        f" prefetch=3, num_workers={workers})\n"
        "next(w); print('read', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", "")


def test_corpus_is_a_dataset_that_pickles(tmp_path):
    text = b"".join(b"%03d," % i for i in range(100))
    (tmp_path / "a.bin").write_bytes(text)
    corpus = byte_corpus(tmp_path / "a.bin", 10)
    assert len(corpus) == 39
    inputs, targets = corpus[3]
    assert bytes(inputs.tolist()) == text[30:40] and bytes(targets.tolist()) == text[31:41]
    assert torch.equal(corpus[-1][0], corpus[38][0])
    assert len(list(corpus)) == 39
    train, validation = corpus.split(0.25)
    assert train.core.elements + validation.core.elements == 400
    copied = pickle.loads(pickle.dumps(validation))
    assert bytes(copied[0][0].tolist()) == text[300:310]
    with pytest.raises(poise.Error, match="sequence_length 500 needs 500 . 1 elements"):
        byte_corpus(tmp_path / "a.bin", 500)
    with pytest.raises(poise.Error, match="nothing.bin"):
        byte_corpus(tmp_path / "nothing.bin", 5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: WindowIterator(Recording(0), 2), "no samples"),
        (lambda: WindowIterator(Recording(3), 0), "micro_batch_size is 0"),
        (lambda: WindowIterator(Recording(3), 1, 0), "accumulation is 0"),
        (lambda: WindowIterator(Recording(3), 1, prefetch=-1), "prefetch is -1"),
        (lambda: WindowIterator(DataLoader(Recording(3)), 2), "micro_batch_size given"),
        (lambda: WindowIterator(7), "no batches in a int"),
        (lambda: next(WindowIterator(iter(()), accumulation=2)), "without any batch"),
        (lambda: WindowIterator(Recording(3), ranks=2, rank=2), "rank 2 of 2"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(poise.Error, match=message):
        make()


def test_count_targets_and_cast_inputs():
    labels = torch.tensor([[1, -100, 2], [-100, -100, 0]])
    assert count_targets(labels).item() == 3
    assert count_targets(labels, shifted=True).item() == 2
    assert count_targets(labels, ignore_index=0).item() == 5
    floats = torch.rand(2, dtype=torch.float64)
    batch = {"x": [floats, labels], "mask": labels > 0, "labels": floats, "name": "n"}
    cast = cast_inputs(batch, torch.bfloat16)
    assert cast["x"][0].dtype is torch.bfloat16 and cast["x"][1] is labels
    assert cast["mask"].dtype is torch.bool and cast["labels"] is floats and cast["name"] == "n"
    kinds = [defaultdict(list, x=floats), UserDict(x=floats), OrderedDict(x=floats)]
    assert all(cast_inputs(one, torch.bfloat16)["x"].dtype is torch.bfloat16 for one in kinds)
    highest = floats[None].max(0)
    assert cast_inputs(highest, torch.float32).values.dtype is torch.float32
    with pytest.raises(poise.Error, match="int64"):
        cast_inputs(batch, torch.int64)
