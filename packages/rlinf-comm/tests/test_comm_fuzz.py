"""A few thousand mutated values, deltas and streams; tools/fuzz.sh runs a million with sanitizers."""

from comm_fuzz import fuzz


def test_mutated_bytes_are_taken_or_refused_in_little_memory_and_reach_nothing():
    report = fuzz(3000, seed=0)
    assert all(report["counts"].get(f"{name} refused", 0) > 50 for name in ("values", "deltas"))
    assert report["counts"]["values taken"] > 50
