# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic state in a world that does not change: commits, roll-backs, samplers."""

import torch

import farandole.torch as hvd


def rolls_back_when_all_ranks_meet_again():
    rank = hvd.rank()
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if rank == 0 else 0.5, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(
        model, optimizer, step=0, note="rank 0's" if rank == 0 else "lost"
    )
    resets, seen, tried = [], [], []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state, steps):
        while state.step < steps:
            optimizer.zero_grad()
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            optimizer.step()
            state.step += 1
            seen.append((state.step, model.weight.detach().clone()))
            if state.step == 4 and not tried:
                tried.append(True)
                # This rank leaves in the middle of a step, as if it had failed: all ranks do so at
                # once.
                raise hvd.HorovodInternalError("told to")
            if state.step % 2 == 0:
                state.commit()
        return state.step

    assert train(state, 6) == 6
    assert [step for step, _ in seen] == [1, 2, 3, 4, 3, 4, 5, 6]
    for again, first in ((4, 2), (5, 3)):
        assert torch.equal(seen[again][1], seen[first][1])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert state.note == "rank 0's"
    assert resets == [hvd.size()]
    return model.weight.tolist()


def test_a_failed_world_goes_back_to_the_last_commit(pair):
    one, other = pair.run(rolls_back_when_all_ranks_meet_again)
    assert one == other


def hosts_come_and_go():
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.step)
        if len(calls) == 1:
            state.step = 5
            if hvd.rank() == 0:
                state.on_hosts_updated(1.0, hvd.elastic.HostUpdateResult.removed)
            state.check_host_updates()
            raise AssertionError("the interrupt did not come")
        state.check_host_updates()
        return state.step

    return train(state), calls


def test_changed_hosts_interrupt_all_ranks_and_lose_no_state(pair):
    assert pair.run(hosts_come_and_go) == [(5, [0, 5])] * 2


def samplers_deal_out_what_is_left(shuffle):
    sampler = hvd.elastic.ElasticSampler(list(range(11)), shuffle=shuffle, seed=3)
    first = list(sampler)[:2]
    sampler.record_batch(0, 2)
    state = hvd.elastic.TorchState(sampler=sampler)
    state.commit()
    sampler.set_epoch(7)
    assert len(sampler) == -(-11 // hvd.size())
    state.restore()
    rest = list(sampler)
    everything = hvd.allgather_object(first + rest)
    assert {index for indices in everything for index in indices} == set(range(11))
    assert len({len(indices) for indices in everything}) == 1
    # As good as nothing left: every rank still has the same number of samples.
    sampler.load_state_dict({"epoch": 0, "processed_num": 10})
    assert len(list(sampler)) == 1
    sampler.record_batch(0, 1)
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 11}
    sampler.reset()
    assert list(sampler) == []
    return rest


def test_samplers_deal_out_what_is_left_of_an_epoch(trio):
    for shuffle in (False, True):
        parts = trio.run(samplers_deal_out_what_is_left, shuffle)
        assert len({index for part in parts for index in part}) == 5


def handlers_can_be_replaced():
    from farandole.torch.elastic import state as states

    class Counter:
        count = 0

    class CounterHandler(states.StateHandler):
        def save(self):
            self.kept = self.value.count

        def restore(self):
            self.value.count = self.kept

        def sync(self):
            self.value.count = hvd.broadcast_object(self.value.count)
            self.save()

    before = states.get_handler_registry()
    states.set_handler_registry([*before, (Counter, CounterHandler)])
    try:
        state = hvd.elastic.TorchState(counter=Counter())
    finally:
        states.set_handler_registry(before)
    state.counter.count = hvd.rank() + 1
    state.sync()
    state.counter.count = 9
    state.restore()
    return state.counter.count


def test_handlers_of_other_types_can_be_added(pair):
    assert pair.run(handlers_can_be_replaced) == [1, 1]


def leaves_with_gradients_under_way():
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model, step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < 2:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            state.step += 1
            if state.step == 2 and not hasattr(state, "failed"):
                state.failed = True
                raise hvd.HorovodInternalError("told to")
            optimizer.step()
            state.commit()
        return model.weight.tolist()

    return train(state)


def test_gradients_under_way_do_not_outlive_their_world_though_the_state_has_no_optimizer(pair):
    one, other = pair.run(leaves_with_gradients_under_way)
    assert one == other


def fails_in_every_world(commits):
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(1)
        assert len(calls) < 10, "no end"
        if len(calls) <= commits:
            state.commit()
        raise hvd.HorovodInternalError("always")

    try:
        train(state)
    except hvd.HorovodInternalError:
        return len(calls)


def test_worlds_that_fail_before_they_have_committed_anything_come_to_an_end(pair):
    assert pair.run(fails_in_every_world, 0) == [4, 4]
    assert pair.run(fails_in_every_world, 3) == [6, 6]
