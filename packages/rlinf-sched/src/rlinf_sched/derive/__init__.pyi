from .datasheets import (
    GPUS as GPUS,
)
from .datasheets import (
    GPUS_PER_NODE as GPUS_PER_NODE,
)
from .datasheets import (
    Gpu as Gpu,
)
from .datasheets import (
    find_gpu as find_gpu,
)
from .datasheets import (
    gpu_cluster as gpu_cluster,
)
from .generation import (
    continuous_points as continuous_points,
)
from .generation import (
    group_cache_tokens as group_cache_tokens,
)
from .groups import profile_of_groups as profile_of_groups
from .lengths import (
    MEAN_SHARE_OF_LIMIT as MEAN_SHARE_OF_LIMIT,
)
from .lengths import (
    Lengths as Lengths,
)
from .memory import (
    CPU_CHUNK_BYTES as CPU_CHUNK_BYTES,
)
from .memory import (
    FLOAT_BYTES as FLOAT_BYTES,
)
from .memory import (
    GPU_CHUNK_BYTES as GPU_CHUNK_BYTES,
)
from .memory import (
    MAX_LOGITS_BYTES as MAX_LOGITS_BYTES,
)
from .memory import (
    NUM_MOMENTS as NUM_MOMENTS,
)
from .memory import (
    Adapter as Adapter,
)
from .memory import (
    JobShape as JobShape,
)
from .memory import (
    RankMemory as RankMemory,
)
from .memory import (
    batch_memory as batch_memory,
)
from .memory import (
    feed_forward_bytes as feed_forward_bytes,
)
from .memory import (
    forward_memory as forward_memory,
)
from .memory import (
    kv_bytes as kv_bytes,
)
from .memory import (
    sft_warm_up_bytes as sft_warm_up_bytes,
)
from .memory import (
    update_bytes as update_bytes,
)
from .memory.rank import MEMORY_KINDS as MEMORY_KINDS
from .parallel import ring_bytes_per_s as ring_bytes_per_s
from .profiles import (
    Embodied as Embodied,
)
from .profiles import (
    Reasoning as Reasoning,
)
from .profiles import (
    derive_profiles as derive_profiles,
)
from .profiles import (
    rule_profile as rule_profile,
)
from .shapes import (
    LLAMA_2_7B as LLAMA_2_7B,
)
from .shapes import (
    ModelShape as ModelShape,
)
from .shapes import (
    find_model as find_model,
)
from .shapes import (
    resolve_model as resolve_model,
)
from .shapes import (
    with_vision_towers as with_vision_towers,
)
from .simulators import (
    CORES_PER_DEVICE as CORES_PER_DEVICE,
)
from .simulators import (
    LIBERO as LIBERO,
)
from .simulators import (
    MANISKILL_PUT_ON_PLATE as MANISKILL_PUT_ON_PLATE,
)
from .simulators import (
    SIMULATORS as SIMULATORS,
)
from .simulators import (
    CpuSimulator as CpuSimulator,
)
from .simulators import (
    GpuSimulator as GpuSimulator,
)
from .simulators import (
    on_busy_cores as on_busy_cores,
)
from .steps import (
    batch_profile as batch_profile,
)
from .steps import (
    describe_numbers as describe_numbers,
)
from .steps import (
    forward_s as forward_s,
)
from .steps import (
    launch_s as launch_s,
)
from .steps import (
    proportional as proportional,
)
from .steps import (
    read_profile as read_profile,
)
from .training import (
    train_profile as train_profile,
)
from .workloads import (
    WORKLOADS as WORKLOADS,
)
from .workloads import (
    embodied as embodied,
)
from .workloads import (
    grpo as grpo,
)
from .workloads import (
    ppo as ppo,
)
from .workloads import (
    workload as workload,
)
