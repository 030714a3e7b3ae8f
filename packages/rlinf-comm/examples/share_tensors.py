"""Two processes look at the same tensors: `python share_tensors.py`."""

import multiprocessing

from rlinf_comm import Channel, SharedPool


def work(tasks, results):
    outgoing = Channel.open(results)
    for task in Channel.open(tasks):  # until the other side closes
        task["image"].mul_(2)  # the other side's memory: nothing was copied, and it sees this
        outgoing.put({"name": task["name"], "mean": task["image"].mean().item()})
    outgoing.close()


if __name__ == "__main__":
    tasks, results = Channel.create("tasks"), Channel.create("results")
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(tasks.address, results.address))
    worker.start()
    pool = SharedPool.create("images", capacity_bytes=256 << 20)
    images = {name: pool.empty((3, 2048, 2048)).fill_(value) for name, value in (("dim", 0.25), ("bright", 1.0))}
    for name, image in images.items():
        tasks.put({"name": name, "image": image})  # 48 MB by reference; a tensor outside of a pool is copied once
    tasks.close()
    for result in results:
        print(result, "here:", images[result["name"]][0, 0, 0].item())
    worker.join()
