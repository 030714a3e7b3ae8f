"""An FSDP2 trainer on two processes feeds an engine in a third: `python fsdp2_to_engine.py`."""

import tempfile

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlinf_comm import Channel
from rlinf_comm.weights import Layout, StoreReceiver, StoreSender, WeightStore, reshard_plan
from rlinf_comm.weights.layouts import fsdp2_layout, local_shards


def train(rank, rendezvous, layouts, stores):
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    torch.manual_seed(0)  # the same first weights on both
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    parameters = dict(model.named_parameters())
    layout = fsdp2_layout(parameters, canonical_dtype="bfloat16")  # float32 here, served as bf16
    Channel.open(layouts).put(layout, key=rank)
    address, reshard = Channel.open(stores).take(keys=[rank])[0].value
    sender = StoreSender(WeightStore.open(address), reshard, rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for version in range(3):
        model(torch.ones(8, 64)).sub(1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sender.publish(local_shards(parameters), version)


if __name__ == "__main__":
    layouts, stores = Channel.create("layouts", num_producers=2), Channel.create("stores")
    arguments = f"file://{tempfile.mkdtemp()}/rendezvous", layouts.address, stores.address
    torch.multiprocessing.spawn(train, arguments, nprocs=2, join=False)
    engine = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).bfloat16()
    layout = layouts.take()[0].value  # the same from either trainer
    reshard = reshard_plan(layout, Layout.replicated(layout.specs, 1))
    store = WeightStore.create(reshard, name="weights")
    for rank in range(2):
        stores.put((store.address, reshard), key=rank)
    receiver = StoreReceiver(store, reshard, dst_rank=0)
    for version in range(3):
        report = receiver.receive(engine.state_dict(), version)
        print(version, report.num_bytes, engine(torch.ones(1, 64).bfloat16()).item())
