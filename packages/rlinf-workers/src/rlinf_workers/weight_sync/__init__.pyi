from .base import WeightPort as WeightPort
from .base import WeightReceiver as WeightReceiver
from .base import WeightSender as WeightSender
from .base import WeightSync as WeightSync
from .choose import suitable_weight_syncs as suitable_weight_syncs
from .spec import EdgeEnds as EdgeEnds
from .spec import WeightSyncSpec as WeightSyncSpec
