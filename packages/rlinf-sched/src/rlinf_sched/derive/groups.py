"""Converts profiles of single environments to profiles of environment groups."""

from dataclasses import replace

from rlinf_sched.derive.training import powers_up_to
from rlinf_sched.profile import InstanceProfile, StageProfile, TimePoint


def profile_of_groups(profile: StageProfile, group_size: int, num_groups: int) -> StageProfile:
    """The profile of a stage whose items are `num_groups` groups of `group_size` of the items of `profile`, which all
    cost the same."""
    return replace(profile, instances=tuple(_of_groups(one, group_size, num_groups) for one in profile.instances))


def _of_groups(instance: InstanceProfile, group_size: int, num_groups: int) -> InstanceProfile:
    return replace(
        instance,
        points=tuple(
            TimePoint(num_items=n, seconds=instance.seconds(n * group_size)) for n in powers_up_to(num_groups)
        ),
        item_work_bytes=instance.item_work_bytes * group_size,
    )
