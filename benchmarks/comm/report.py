"""The communication part of docs/performance.md: tables and a plot, from what pytest-benchmark wrote (measuring.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.targets import marked

HAND_OVER, COPIES, RESHARD, CHANNEL = "comm-handover", "comm-copies", "comm-reshard", "comm-channel"
CHECKS, SYNC, GPU_CHECK = "comm-checks", "weight-sync", "gpu-check"
REMOTE_CHANNEL, REMOTE_WEIGHTS = "comm-remote-channel", "comm-weights-between-hosts"

TARGET_SIDES = ("pulled from the pool", "program")
"""Sides of resharding that have the target of 0.90 of a flat copy."""


class Measured:
    """One JSON file; its benchmarks by what stands in the brackets of their names."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        machine = content["machine_info"]
        versions = machine.get("versions", {})
        self.origin = (
            f"{machine['cpu'].get('brand_raw', machine['processor'])}, {content['datetime'][:10]}, commit "
            f"{content['commit_info']['id'][:7]}, torch {versions.get('torch')}, load {machine.get('load', ['?'])[0]}"
        )
        self.cases: dict[str, dict[str, dict[str, Any]]] = {}
        for benchmark in content["benchmarks"]:
            test = benchmark["name"].split("[")[0].removeprefix("test_")
            case = benchmark.get("param") or benchmark["name"]
            self.cases.setdefault(test, {})[case] = benchmark["extra_info"]

    def side(self, test: str, case: str, side: str) -> dict[str, float]:
        return self.cases[test][case]["sides"][side]


def load(results: Path, name: str) -> Measured | None:
    path = results / f"{name}.json"
    return Measured(path) if path.exists() else None


def sections(results: Path, images: Path) -> Iterator[str]:
    """Lines of the page; the plots are written beside."""
    if measured := load(results, HAND_OVER):
        yield from _hand_overs(measured)
        _draw_hand_overs(measured, images / "hand-over.svg")
        yield "![Time of a transfer by size](images/hand-over.svg)\n"
    if measured := load(results, CHANNEL):
        yield from _channel(measured)
    if measured := load(results, RESHARD):
        yield from _shares(
            measured,
            "reshard_across_processes",
            "Resharding across processes, one thread: GB a second stored by the engine, and the ratio to a flat copy "
            "past the caches in the same run. Target: 0.90 pulled from a pool, ten times gloo",
        )
    if measured := load(results, COPIES):
        yield from _shares(
            measured,
            "reshard",
            "Resharding within one process, in the same units. Target: 0.90 of the flat copy (with a cast: of a flat "
            "cast). memcpy and numpy have one thread in every column, and do not cast",
        )
        yield from _shares(measured, "digest", "Digests: GB a second, and the ratio to one read by torch's sum")
    path = results / f"{CHECKS}.json"
    if path.exists():
        yield from _checks(json.loads(path.read_text()))
    path = results / f"{SYNC}.json"
    if path.exists():
        yield from _syncs(json.loads(path.read_text()))
    paths = [results / f"{name}.json" for name in (REMOTE_CHANNEL, REMOTE_WEIGHTS)]
    if all(path.exists() for path in paths):
        yield from _between_hosts(*(json.loads(path.read_text()) for path in paths))
    path = results / f"{GPU_CHECK}.json"
    if path.exists():
        yield from _on_gpu(json.loads(path.read_text())["benchmark"])


def _between_hosts(channel: dict[str, Any], sync: dict[str, Any]) -> Iterator[str]:
    """Over loopback TCP: remote_channel.py and weights_between_hosts.py."""
    yield (
        "\nTransfers between two simulated hosts over loopback TCP, on the same two cores: time of the others over "
        "ours. Targets: 3 for Ray's object store and a gloo send, 0.8 for a bare socket (weights: 0.7).\n"
    )
    yield "| transfer | Ray | gloo | bare socket |\n|---|---|---|---|"
    took_s, targets = channel["medians_s"], {"Ray": 3, "gloo": 3, "socket": 0.8}
    for size in ("1 MB", "256 bytes"):
        ratios = {peer: took_s[f"{peer}, {size}"] / took_s[f"door, {size}"] for peer in targets}
        cells = (marked(f"{ratio:.2f}", meets=ratio >= targets[peer]) for peer, ratio in ratios.items())
        yield f"| channel, items of {size} | {' | '.join(cells)} |"
    took_s, settings = sync["medians_s"], sync["settings"]
    for way in ("per_node", "streams"):
        crossing = sync["findings"]["crossing_bytes"][way] / settings["model_bytes"]
        ratio = took_s["socket"] / took_s[way]
        yield (
            f"| weights, {settings['model_bytes'] / 1e6:.0f} MB, {settings['trainer_ranks']} trainer ranks to "
            f"{settings['engine_ranks']} engine ranks, `{way}`: {crossing:.3f} of the model crosses | | "
            f"| {marked(f'{ratio:.2f}', meets=ratio >= 0.7)} |"
        )
    gloo = channel["medians_s"]["socket, 1 MB"] / channel["medians_s"]["gloo, 1 MB"]
    yield (
        f"\ngloo sends 1 MB at {gloo:.2f} of the bare socket's rate, so nothing over TCP can be more than "
        f"{1 / gloo:.1f} times as fast. A channel is limited by the receiving process: besides reading bytes from the "
        "system it digests them and copies them into the channel's memory, each a sixth of its time. The bare socket "
        "sends the same 64 MB repeatedly and only moves them. A weight sync also packs and digests the weights, "
        "digests the received bytes, copies them to two replicas and digests the served weights, and keeps both cores "
        "busy for nine tenths of its time.\n"
    )


def _on_gpu(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"\nIn the memory of one GPU ({result['device']}), GB a second written (a cast reads twice as much), or read "
        "by a digest.\n"
    )
    yield "| operation | ours | a flat copy | ratio |\n|---|---|---|---|"
    for name, rates in result.items():
        if isinstance(rates, dict) and "max_ctas_1056" in rates:
            best = max(rate for key, rate in rates.items() if key.startswith("max_ctas"))
            kind, _, dtype = name.rpartition("_")
            yield (
                f"| reshard, {kind.replace('_', ' ')}, {dtype} to bfloat16 | {best:,.0f} | {rates['memcpy']:,.0f} "
                f"| {best / rates['memcpy']:.2f} |"
            )
    yield "\n| digest of | ours | the fastest read | ratio |\n|---|---|---|---|"
    for name in ("digest", "digest_64_mb", "digest_1_mb"):
        rates = result[name]
        best = max(rate for key, rate in rates.items() if key.startswith("program"))
        read = max(2 * rates["memcpy"], rates["maximum"])
        yield f"| {rates['bytes'] / 1e6:,.0f} MB | {best:,.0f} | {read:,.0f} | {best / read:.2f} |"
    yield ""


def _syncs(result: dict[str, Any]) -> Iterator[str]:
    """Syncs in shared memory: weight_sync.py."""
    yield (
        "\nA sync of about a gigabyte in shared memory to an engine with TP2, one process and thread for each rank; "
        "medians over rounds of the ratios within a round. `critical`: publishing and the copy into the engine's "
        "tensors; `total`: also the digests, which run concurrently with the first chunk. `by reference`: the engine "
        "copies from the trainer's tensors and both sides digest only afterwards, so the critical path has no digests. "
        "`stored`: through the store, for engines that read the weights late. Targets: 0.8 of a flat copy; 1.2 on the "
        "critical path and 2.5 in total of the same sync without digests; 64 MB in addition to the weights "
        f"({result['machine']['processor']}, {result['date'][:10]}, load "
        f"{result['machine']['load_average_1_min']:.1f}).\n"
    )
    yield (
        "| trainer | flat copy / critical, by reference | total / critical, by reference | flat copy / critical, "
        "stored | critical, attested / not, stored | total, attested / not, stored | MB beyond the weights, by "
        "reference | moves, plan |\n|---|---|---|---|---|---|---|---|"
    )
    ratios = {(c["numerator"], c["denominator"]): c["median_of_ratios"] for c in result["comparisons"]}
    for name, findings in result["findings"].items():
        sides = (
            ("flat copy", "lent, critical", 0.8, 99),
            ("lent, all", "lent, critical", 0, 2.5),
            ("flat copy", "stored, critical", 0.8, 99),
            ("stored, critical", "stored, plain, critical", 0, 1.2),
            ("stored, all", "stored, plain, critical", 0, 2.5),
        )  # and the target: from, to
        cells = " | ".join(
            marked(f"{ratio:.2f}", meets=low <= ratio <= high)
            for above, below, low, high in sides
            for ratio in [ratios[f"{name}: {above}", f"{name}: {below}"]]
        )
        extra = {what: max(ranks) / 2**20 for what, ranks in findings["extra_bytes_of_ranks"].items()}
        most = f"{max(extra['trainer, lent'], extra['engine, lent']):.0f}, {extra['trainer, moved']:.0f} once"
        yield (
            f"| {name} | {cells} | {most} | {findings['num_moves']:,}, {1e3 * findings['plan_s']:.0f} ms, "
            f"{findings['packed_plan_bytes'] / 1e3:.0f} KB |"
        )
    yield ""


def _checks(result: dict[str, Any]) -> Iterator[str]:
    """What digests catch and cost: checks.py."""
    machine = (
        f"{result['machine']['processor']}, {result['date'][:10]}, load {result['machine']['load_average_1_min']:.1f}"
    )
    yield f"\nDetection of single flipped bits. Target: all ({machine}).\n"
    yield "| transport | flipped | detected |\n|---|---|---|"
    for way, row in result["findings"]["flips"].items():
        yield f"| {way} | {row['flips']:,} | {row['caught']:,} |"
    slower = result["findings"]["slower_contact_ms"]
    alone, besieged = (1e3 * result["medians_s"][f"contact, {who}"] for who in ("no strangers", "strangers"))
    yield (
        f"\nA first contact (joining the directory, connecting to a peer, sending one value): median {alone:.1f} ms, "
        f"and {besieged:.1f} ms while 60 idle and slow strangers and 20 malformed connections a second load both "
        f"servers; {slower['median']:.1f} ms (median) and {slower['most']:.1f} ms (maximum) longer than the other of "
        "its round. Target: at most 100 ms.\n"
    )
    yield (
        "\nCost of digests: a transfer with its acknowledgement over TCP between two processes, and a put and a take "
        "of a channel and of a pool in one process, with and without digests; medians.\n"
    )
    yield "| transport, size | with | without | with / without |\n|---|---|---|---|"
    for c in result["comparisons"]:
        cells = " | ".join(_rate(c[side], result) for side in ("numerator", "denominator"))
        yield f"| {c['numerator'].removesuffix(', with')} | {cells} | {c['ratio_of_medians']:.2f} |"
    yield "\n| hash of 16 MB in memory | GB a second |\n|---|---|"
    for name, rate in result["findings"]["hash_gb_per_s"].items():
        yield f"| {name} | {rate:.1f} |"
    yield ""


def _rate(case: str, result: dict[str, Any]) -> str:
    """Microseconds, and gigabytes a second where that says something: not of a few bytes, and not by reference."""
    way, size, digests = case.split(", ")
    seconds = result["medians_s"][case]
    num_bytes = result["settings"]["sizes_bytes"][size]
    shows_rate = num_bytes >= 1 << 20 and not (way == "pool" and digests == "without")
    return f"{_us(1e6 * seconds)} us" + (f", {num_bytes / seconds / 1e9:.1f} GB/s" if shows_rate else "")


def _hand_overs(measured: Measured) -> Iterator[str]:
    cases = measured.cases["tensor"]
    sides = list(next(iter(cases.values()))["sides"])
    yield f"\nSending a tensor to another process and an acknowledgement back, medians in us ({measured.origin}).\n"
    yield f"| | {' | '.join(cases)} |\n|---|{'---|' * len(cases)}"
    for side in sides:
        yield f"| {side} | {' | '.join(_us(case['sides'][side]['median_us']) for case in cases.values())} |"
        if side in ("channel", "pool, by reference"):
            first = (_us(case["sides"][side].get("first_us")) for case in cases.values())
            yield f"| {side}, after a pause | {' | '.join(first)} |"
    yield ""
    yield from _targets(measured)
    if structures := measured.cases.get("structure"):
        yield f"\n| structured values | {' | '.join(structures)} |\n|---|{'---|' * len(structures)}"
        for side in next(iter(structures.values()))["sides"]:
            yield f"| {side} | {' | '.join(_us(case['sides'][side]['median_us']) for case in structures.values())} |"
        yield ""


def _us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _targets(measured: Measured) -> Iterator[str]:
    """The targets, and what was reached."""
    small = measured.side("tensor", "4 KB", "channel")["median_us"]
    queue = measured.side("tensor", "4 KB", "torch queue")["median_us"]
    by_reference = [case["sides"]["pool, by reference"]["median_us"] for case in measured.cases["tensor"].values()]
    share = measured.side("tensor", "128 MB", "pool, copied out")["share_by_round"]
    yield "| target | reached |\n|---|---|"
    yield f"| 4 KB: at most 15 us | {marked(f'{small:.1f} us', meets=small <= 15)} |"
    times = marked(f"{queue / small:.1f}", meets=queue >= 20 * small)
    yield f"| 4 KB: a torch queue takes at least 20 times as long | {times} |"
    yield f"| any size from a pool: constant, at most 25 us | {min(by_reference):.1f} to {max(by_reference):.1f} us |"
    own = marked(f"{share:.2f}", meets=share >= 0.85)
    yield f"| 128 MB into the receiver's own memory: 0.85 of a copy past the caches | {own} |"
    yield ""


def _shares(measured: Measured, test: str, title: str) -> Iterator[str]:
    """A row for each side, a column for each case."""
    cases = measured.cases.get(test)
    if not cases:
        return
    yield f"\n{title} ({measured.origin}).\n"
    yield f"| | {' | '.join(_short(case) for case in cases)} |\n|---|{'---|' * len(cases)}"
    for side in next(iter(cases.values()))["sides"]:
        rows = (case["sides"].get(side) for case in cases.values())  # memcpy has no cast
        least = 0.9 if side in TARGET_SIDES else 0
        cells = (
            marked(f"{row['gb_per_s']:.1f} ({row['share_by_round']:.2f})", meets=row["share_by_round"] >= least)
            if row
            else "-"
            for row in rows
        )
        yield f"| {side} | {' | '.join(cells)} |"
    yield ""


def _short(case: str) -> str:
    """A benchmark's name may hold two parameters: [1 thread-Qwen...], [tensor-64]."""
    inside = case.split("[")[-1].rstrip("]")
    for first, text in (
        ("thread", "thread: "),
        ("threads", "threads: "),
        ("tensor", "tensors, "),
        ("bytes", "bytes, "),
    ):
        inside = inside.replace(f"{first}-", text)
    return inside


def _channel(measured: Measured) -> Iterator[str]:
    yield (
        "\nItems of 1 KB a second through one channel or queue, two producing and two consuming processes. Target: "
        f"100,000 ({measured.origin}).\n"
    )
    yield "| items, maximum per take | channel | multiprocessing.Queue | torch queue |\n|---|---|---|---|"
    for case, seen in measured.cases.get("items_per_second", {}).items():
        rates = (f"{seen[f'{side}_items_per_s']:,}" for side in ("channel", "multiprocessing", "torch"))
        yield f"| {_short(case)} | {' | '.join(rates)} |"
    yield "\n| round trip of 4 KB, number of cores | channel | torch queue |\n|---|---|---|"
    for case, seen in measured.cases.get("round_trip_of_4_kb", {}).items():
        times = (f"{seen[f'{side}_median_us']:.1f} us" for side in ("channel", "torch"))
        yield f"| {_short(str(case))} | {' | '.join(times)} |"
    yield ""


def _draw_hand_overs(measured: Measured, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "rlinf"  # the same file from the same numbers
    cases = measured.cases["tensor"]
    sizes = [case["num_bytes"] for case in cases.values()]
    figure, axes = plt.subplots(figsize=(8.5, 5))
    for side in next(iter(cases.values()))["sides"]:
        ours = side.startswith(("channel", "pool"))
        limit = side.startswith("memcpy")
        times = [case["sides"][side]["median_us"] for case in cases.values()]
        style: dict[str, Any] = {"linewidth": 2.2} if ours else {"linewidth": 1, "linestyle": ":" if limit else "--"}
        axes.plot(sizes, times, marker="o", markersize=3, label=side, **style)
    axes.set(xscale="log", yscale="log", xlabel="tensor", ylabel="hand-over and acknowledgement, us")
    axes.set_xticks(sizes, list(cases), rotation=30)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
