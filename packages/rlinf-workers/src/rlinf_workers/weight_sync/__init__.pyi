from .base import (
    WeightPort as WeightPort,
    WeightReceiver as WeightReceiver,
    WeightSender as WeightSender,
    WeightSync as WeightSync,
)
from .choose import suitable_weight_syncs as suitable_weight_syncs
from .spec import EdgeEnds as EdgeEnds, WeightSyncSpec as WeightSyncSpec
